"""The compiled loop of `fingerprint.py`; imported where numba is installed."""

import numpy as np
from numba import njit

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def digest(words, lanes):
    """Takes words into the lanes, one after another."""
    count = len(lanes)
    for begin in range(0, len(words), count):
        part = words[begin : begin + count]
        for lane in range(len(part)):
            lanes[lane] = (lanes[lane] ^ part[lane]) * _MULTIPLIER
