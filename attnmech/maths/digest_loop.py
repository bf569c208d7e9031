"""The compiled loop of `fingerprint.py`; imported where numba is installed."""

from typing import Final

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from .loop_parts import taken, words_at

LANES: Final = 64
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def shared_digest(edges, tickets, arguments):
    """`digest` of slices that nobody has taken yet: of parts of memory by address and number of words."""
    addresses, lengths, lanes = arguments
    part = taken(tickets)
    while part < len(edges) - 1:
        for place in range(edges[part], edges[part + 1]):
            digest(carray(words_at(addresses[place]), lengths[place]), lanes[place])
        part = taken(tickets)


@njit(nogil=True, cache=True)
def digest(words, lanes):
    """Takes words into the lanes, one after another."""
    whole = len(words) // LANES * LANES
    for begin in range(0, whole, LANES):
        part = words[begin : begin + LANES]
        for lane in range(LANES):
            lanes[lane] = (lanes[lane] ^ part[lane]) * _MULTIPLIER
    rest = words[whole:]
    for lane in range(len(rest)):
        lanes[lane] = (lanes[lane] ^ rest[lane]) * _MULTIPLIER
