"""The compiled loop of `fingerprint.py`; imported where numba is installed."""

from typing import Final

import numpy as np
from numba import njit

LANES: Final = 64
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


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
