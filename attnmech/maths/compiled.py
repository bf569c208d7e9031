"""When do compiled loops run, and on which threads?

numba compiles them once for a machine. They hold no interpreter lock: the caller and threads of a pool each take slices
of the work. numba's own threads stay unused, since two threads of a program must not enter those of its default layer.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from threading import Barrier
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

AVAILABLE: Final = find_spec("numba") is not None
"""Whether numba is installed (extra `fast`)."""

_WORTH_A_THREAD: Final = 2**15


def loops_run() -> bool:
    """Whether there are compiled loops here; else torch computes the same."""
    return AVAILABLE and _can_be_compiled()


def compiles(values: Tensor) -> bool:
    """Whether the loops take a tensor: numba runs; on the CPU, in float32 or float64, without gradients."""
    known = values.dtype in (torch.float32, torch.float64)
    return known and values.device.type == "cpu" and not values.requires_grad and loops_run()


@cache
def _can_be_compiled() -> bool:
    """False if numba is switched off (NUMBA_DISABLE_JIT), does not fit numpy, or finds no folder for compiled code."""
    try:
        from numba import config

        if getattr(config, "DISABLE_JIT", False):
            return False
        # Where neither the package's folder nor the user's cache is writable, numba refuses to mark a function.
        from . import row_loops  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def in_threads(count: int, each: int, loop: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Has a loop go through `count` things, in as many slices as torch has threads.

    Each thing has `each` numbers to go through: a few numbers are not worth a thread. `loop(edges, tickets, arguments)`
    takes slices, one after another, that nobody has taken yet (`loop_parts.taken`).
    """
    slices = max(1, min(count, torch.get_num_threads(), count * each // _WORTH_A_THREAD))
    edges, tickets = np.array([count * part // slices for part in range(slices + 1)]), np.zeros(1, np.int64)
    work = partial(loop, edges, tickets, arguments)
    others = [_threads().submit(work) for _ in range(1, slices)]
    try:
        work()
    finally:
        for other in others:
            other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    """A pool whose threads have all begun: one that an interruption catches while it begins would never end."""
    count = os.cpu_count() or 1
    pool, begun = ThreadPoolExecutor(count, thread_name_prefix="attnmech"), Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(begun.wait)
        begun.wait()
    finally:
        begun.abort()
    return pool


if hasattr(os, "register_at_fork"):
    # A forked process has the pool without its threads.
    os.register_at_fork(after_in_child=_threads.cache_clear)
