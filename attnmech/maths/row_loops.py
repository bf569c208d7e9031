"""The compiled loops of `compiled_rows.py`; imported where numba is installed.

`in_threads` calls the `shared_` ones on several threads at once: one for each loop, since numba compiles a function
that is given another in every process anew.

Each is written so that it runs on vectors. Rows are cut with slices, since an index that might be negative is checked
one by one. A maximum of floats is not vectorised, so it is taken of their bits: as integers, those of floats of one
sign are in the floats' order.
"""

import math
from typing import Any, Final

import numpy as np
from numba import njit

from .loop_parts import taken

SUMMED: Final = 2048
"""How many keys are summed in the scores' precision before the sum is added to one in float64."""
_SEARCHED: Final = 128
"""How many probabilities have a maximum of their own, so that the highest is found without reading the row again."""
_FAR_BELOW: Final = -1000.0
"""exp(-1000) is 0 in any precision, and 0 · (−∞) would be NaN."""
_LN_2: Final = 0.693359375, math.log(2) - 0.693359375
"""In two parts: n times the first is exact."""
compiled: Final = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
"""Sums may be rearranged; NaN and infinities keep their meaning."""


def _precision(real: Any, whole: Any, mantissa: int, lowest: float, terms: int) -> tuple[Any, ...]:
    """The integers under a float, with one that is 1 in its exponent; below which d e^d counts as 0; 1/k!."""
    return np.array([1 << mantissa], whole), real(lowest), tuple(real(1 / math.factorial(k)) for k in range(terms))


PRECISIONS: Final = {
    np.float32: _precision(np.float32, np.int32, 23, -87.0, 8),
    np.float64: _precision(np.float64, np.int64, 52, -708.0, 14),
}


@compiled
def shared_softmax(edges, tickets, arguments):
    """`softmax` of the slices, between the edges, that nobody has taken yet."""
    part = taken(tickets)
    while part < len(edges) - 1:
        softmax(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@compiled
def shared_sum_by_key(edges, tickets, arguments):
    """`sum_by_key` of such slices."""
    part = taken(tickets)
    while part < len(edges) - 1:
        sum_by_key(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@compiled
def shared_sum_by_diagonal(edges, tickets, arguments):
    """`sum_by_diagonal` of such slices."""
    part = taken(tickets)
    while part < len(edges) - 1:
        sum_by_diagonal(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@compiled
def softmax(
    start, stop, first_row, places, begins, last, with_sink, precision, sinks, runs, tokens, classes,
    scores, pattern, key, by_key, by_diagonal, measured,
):  # fmt: skip
    """The softmax of all rows of a slice of the heads, and what is measured of each, in the order of `MeasuredRows`.

    What keys and diagonals receive of a class of rows is summed in the scores' precision, then added to sums of the
    whole layer in float64.
    """
    unit, lowest, coefficients = precision
    (_, rows, keys), real = scores.shape, scores.dtype.type
    heads = len(scores) // len(classes)
    kinds = classes.shape[1]
    at_key = np.empty((kinds, keys), scores.dtype)
    at_diagonal = np.empty((kinds, keys + len(runs) * (rows - 1)), scores.dtype)
    powers, maxima = np.empty(keys, unit.dtype), np.empty((keys + _SEARCHED - 1) // _SEARCHED, unit.dtype)
    integer = np.empty(1, unit.dtype)
    number = integer.view(scores.dtype)
    for head in range(start, stop):
        members = classes[head // heads]
        for kind in range(kinds):
            if members[kind].any():
                at_key[kind] = 0
                at_diagonal[kind] = 0
        for row in range(rows):
            s, p = scores[head, row], pattern[head, row]
            bits = p.view(unit.dtype)
            integer[0] = _highest(s.view(unit.dtype))
            shift = max(number[0], sinks[head]) if with_sink else number[0]
            _exponentials(s, shift, p, powers, unit[0], lowest, coefficients)
            _add(bits, powers)
            weight, weighted = _sums(p, s, shift)
            far = _far(p[: len(places)], places, real(first_row + row))
            of_sink = math.exp(sinks[head] - shift) if with_sink else 0.0
            total = weight + of_sink
            _normalise(p, bits, real(1.0 / total), maxima)
            best = _place(bits, maxima)
            key[head, row] = best
            measured[0, head, row] = p[best]
            integer[0] = _second(bits, bits[best])
            measured[1, head, row] = number[0]
            measured[2, head, row] = max((weight * math.log(total) - weighted) / total, 0.0)
            measured[3, head, row] = far / total
            measured[4, head, row] = of_sink / total
            _near(p, begins[head // heads], first_row + row, last, measured[5:, head, row])
            for kind in range(kinds):
                if members[kind, row]:
                    _receive(p, at_key[kind], at_diagonal[kind], row, rows, runs, tokens)
        for kind in range(kinds):
            if members[kind].any():
                _flush(at_key[kind], at_diagonal[kind], first_row, rows, runs, tokens, by_key[head, kind],
                       by_diagonal[head, kind])  # fmt: skip


@compiled
def _near(p, begin, here, last, masses):
    """The probability of a text's first token, of a row's own, of the one before, and of the last together."""
    masses[0] = p[begin] if begin < len(p) else 0
    masses[1] = p[here] if here < len(p) else 0
    masses[2] = p[here - 1] if 0 < here <= len(p) else 0
    masses[3] = 0
    for place in range(max(0, here + 1 - last), min(here + 1, len(p))):
        masses[3] += p[place]


@compiled
def _receive(p, at_key, at_diagonal, row, rows, runs, tokens):
    """Adds a row to what its keys and their diagonals receive, run by run of neighbouring keys.

    A run's diagonals are counted from the block's last row and the run's first key.
    """
    for j in range(len(p)):
        at_key[j] += p[j]
    for run in range(len(runs)):
        begin, end = runs[run, 0], min(runs[run, 1], tokens)
        weights, shifted = p[begin:end], at_diagonal[begin + (run + 1) * (rows - 1) - row :]
        for j in range(len(weights)):
            shifted[j] += weights[j]


@compiled
def _flush(at_key, at_diagonal, first_row, rows, runs, tokens, by_key, by_diagonal):
    """Adds what a block's rows give to the sums of the layer, whose diagonals are those of all rows and tokens."""
    queries = len(by_diagonal) - tokens + 1
    for run in range(len(runs)):
        begin, end, place = runs[run]
        received, total = at_key[begin:end], by_key[place:]
        for j in range(len(received)):
            total[j] += received[j]
        count = min(end, tokens) - begin
        if count > 0:
            far = at_diagonal[begin + run * (rows - 1) :][: count + rows - 1]
            total = by_diagonal[place - first_row + queries - rows :]
            for j in range(len(far)):
                total[j] += far[j]


@compiled
def _highest(bits):
    """The bits of the largest of a row of floats of either sign."""
    whole = bits.dtype.type
    sign = whole(8 * bits.itemsize - 1)
    magnitude = whole(~(whole(1) << sign))
    best = whole(~magnitude)
    for j in range(len(bits)):
        x = bits[j]
        best = max(best, whole(x ^ whole(whole(x >> sign) & magnitude)))
    return whole(best ^ whole(whole(best >> sign) & magnitude))


@compiled
def _exponentials(s, shift, p, powers, unit, lowest, coefficients):
    """e^(s − shift) = 2^n · Σ_k g^k / k!, |g| at most half of ln 2: the sums, and n in the exponent's bits."""
    whole, real = powers.dtype.type, p.dtype.type
    to_two, half, none = real(1 / math.log(2)), real(0.5), real(0)
    high, low, last = real(_LN_2[0]), real(_LN_2[1]), len(coefficients) - 1
    for j in range(len(s)):
        d = s[j] - shift
        vanishes = d < lowest
        n = whole(0) if vanishes else whole(d * to_two - half)
        f = real(n)
        g = (d - f * high) - f * low
        y = coefficients[last]
        for k in range(last - 1, -1, -1):
            y = y * g + coefficients[k]
        p[j] = none if vanishes else y
        powers[j] = whole(n * unit)


@compiled
def _add(bits, powers):
    for j in range(len(bits)):
        bits[j] += powers[j]


@compiled
def _sums(p, s, shift):
    """Σ p and Σ p (s − shift)."""
    real = p.dtype.type
    far_below, total, weighted = real(_FAR_BELOW), 0.0, 0.0
    for begin in range(0, len(p), SUMMED):
        weights, scores = p[begin : begin + SUMMED], s[begin : begin + SUMMED]
        a, b = real(0), real(0)
        for j in range(len(weights)):
            a += weights[j]
            b += weights[j] * max(scores[j] - shift, far_below)
        total += a
        weighted += b
    return total, weighted


@compiled
def _far(p, places, here):
    """Σ p |here − place|."""
    far = 0.0
    for begin in range(0, len(p), SUMMED):
        weights, at = p[begin : begin + SUMMED], places[begin : begin + SUMMED]
        a = p.dtype.type(0)
        for j in range(len(weights)):
            a += weights[j] * abs(here - at[j])
        far += a
    return far


@compiled
def _normalise(p, bits, factor, maxima):
    """Multiplies a row, and finds the largest of every `_SEARCHED` keys."""
    whole = bits.dtype.type
    for part in range(len(maxima)):
        values, here = p[part * _SEARCHED : (part + 1) * _SEARCHED], bits[part * _SEARCHED : (part + 1) * _SEARCHED]
        for j in range(len(values)):
            values[j] *= factor
        best = whole(0)
        for j in range(len(here)):
            best = max(best, here[j])
        maxima[part] = best


@compiled
def _place(bits, maxima):
    """Where the largest is; the last place if all are NaN."""
    best = maxima.dtype.type(0)
    for part in range(len(maxima)):
        best = max(best, maxima[part])
    place = 0
    while maxima[place // _SEARCHED] != best:
        place += _SEARCHED
    while place < len(bits) - 1 and bits[place] != best:
        place += 1
    return place


@compiled
def _second(bits, best):
    """The bits of the next to the largest: the same if there are several."""
    whole = bits.dtype.type
    times, second = whole(0), whole(0)
    for j in range(len(bits)):
        x = bits[j]
        times += whole(x == best)
        second = max(second, x if x < best else whole(0))
    return best if times > 1 else second


@njit(nogil=True, cache=True)
def sum_by_key(start, stop, pattern, classes, sums):
    """Adds the rows of each class of a slice of the heads."""
    heads = len(pattern) // len(classes)
    for head in range(start, stop):
        for row in range(pattern.shape[1]):
            p = pattern[head, row]
            for kind in range(classes.shape[1]):
                if classes[head // heads, kind, row]:
                    total = sums[head, kind]
                    for j in range(len(p)):
                        total[j] += p[j]


@njit(nogil=True, cache=True)
def sum_by_diagonal(start, stop, pattern, classes, sums):
    """Likewise by diagonal of the block: that of row r and key j is j − r, counted from the last row's first key."""
    heads, rows = len(pattern) // len(classes), pattern.shape[1]
    for head in range(start, stop):
        for row in range(rows):
            p = pattern[head, row]
            for kind in range(classes.shape[1]):
                if classes[head // heads, kind, row]:
                    shifted = sums[head, kind][rows - 1 - row :]
                    for j in range(len(p)):
                        shifted[j] += p[j]
