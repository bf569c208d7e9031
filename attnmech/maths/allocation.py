"""Where does a pass get its memory? From what it or the last freed, which glibc would give back and ask for again."""

import ctypes
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

LEAST: Final = 8 * 2**20
"""Passes whose widest activation takes fewer bytes find room anyway."""

HELD: Final = 384 * 2**20
"""By how many bytes the process may have grown after a pass before all that is free goes back."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_DURING: Final = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20, _MMAP_THRESHOLD: 2**31 - 1}
_AFTER: Final = {_TRIM_THRESHOLD: HELD, _TOP_PAD: 0, _MMAP_THRESHOLD: 32 * 2**20}
"""The last is where glibc's own adjustments end in a process that frees arrays of more than 32 MB."""

_SET_BY_USER: Final = ("MALLOC_", "GLIBC_TUNABLES")
"""The beginnings of variables with which somebody has told the C library what to keep."""


class _Passes:
    """How many passes of all threads are under way, and the least that the process held since free memory went back."""

    def __init__(self) -> None:
        self.lock, self.count, self.least = threading.Lock(), 0, math.inf


_passes: Final = _Passes()


@contextmanager
def freed_memory_kept(widest: int) -> Iterator[None]:
    """Lets the blocks inside use again what was freed; afterwards all of it goes back to the system, or none.

    glibc gives arrays above 32 MB back as soon as they are freed, and what is free at the end of its heap above 64 MB.
    Every page that is asked for again costs a fault: a fifth of the time of a pass over 2048 tokens. What a pass leaves
    free stays for the next, until the process has grown by more than `HELD` bytes. Nothing is done on other C
    libraries, where a `MALLOC_` variable or `GLIBC_TUNABLES` is set, and where the `widest` activation takes less than
    `LEAST` bytes.
    """
    libc = _glibc() if widest >= LEAST else None
    if libc is None:
        yield
        return
    with _passes.lock:
        _passes.count += 1
        if _passes.count == 1:
            _passes.least = min(_passes.least, _resident())
            _set(libc, _DURING)
    try:
        yield
    finally:
        with _passes.lock:
            _passes.count -= 1
            if not _passes.count:
                _set(libc, _AFTER)
                if _resident() - _passes.least > HELD:
                    libc.malloc_trim(0)
                    _passes.least = _resident()


def _set(libc: Any, settings: dict[int, int]) -> None:
    for name, value in settings.items():
        libc.mallopt(name, value)


@cache
def _glibc() -> Any | None:
    """The C library, if it is glibc and nobody has told it what to keep."""
    if any(name.startswith(_SET_BY_USER) for name in os.environ):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim  # noqa: B018 - raises if there is none
        _resident()
    except (OSError, AttributeError, TypeError):
        return None
    return libc


def _resident() -> int:
    """How many bytes of memory the process holds."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
