"""The compiled loop of `compared.py`; imported where numba is installed."""

import math

from numba import njit

from .loop_parts import taken
from .row_loops import SUMMED, compiled


@njit(nogil=True, cache=True)
def shared_compare(edges, tickets, arguments, _):
    """`compare` of slices of the tokens that nobody has taken yet."""
    part = taken(tickets)
    while part < len(edges) - 1:
        compare(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@njit(nogil=True, cache=True)
def compare(start, stop, updates, streams, constant, factors, found):
    """Of each token: ‖u‖, ‖x‖, u · x and, where there is a constant c, ‖u − b c‖."""
    for token in range(start, stop):
        u, x = updates[token], streams[token]
        of_u, of_x, product, of_rest = 0.0, 0.0, 0.0, 0.0
        for begin in range(0, len(u), SUMMED):
            part = slice(begin, begin + SUMMED)
            a, b, c = _squares(u[part], x[part])
            of_u, of_x, product = of_u + a, of_x + b, product + c
            if len(constant):
                of_rest += _square_without(u[part], constant[part], factors[token])
        found[0, token] = math.sqrt(of_u)
        found[1, token] = math.sqrt(of_x)
        found[2, token] = product
        found[3, token] = math.sqrt(of_rest)


@compiled
def _squares(u, x):
    of_u = of_x = product = u.dtype.type(0)
    for j in range(len(u)):
        of_u += u[j] * u[j]
        of_x += x[j] * x[j]
        product += u[j] * x[j]
    return of_u, of_x, product


@compiled
def _square_without(u, constant, factor):
    total = u.dtype.type(0)
    for j in range(len(u)):
        rest = u[j] - factor * constant[j]
        total += rest * rest
    return total
