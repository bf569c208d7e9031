"""When do compiled loops run, and on which threads?

numba compiles them once for a machine. They hold no interpreter lock: each of a few threads takes a slice of the work.
numba's own threads stay unused, since those of its default layer must not be entered by two threads of a program.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

AVAILABLE: Final = find_spec("numba") is not None
"""Whether numba is installed (extra `fast`)."""

_WORTH_A_THREAD: Final = 2**15


def compiles(values: Tensor) -> bool:
    """Whether the loops take a tensor: numba is there; on the CPU, in float32 or float64, without gradients."""
    known = values.dtype in (torch.float32, torch.float64)
    return AVAILABLE and known and values.device.type == "cpu" and not values.requires_grad


def in_threads(count: int, each: int, work: Callable[[int, int], Any]) -> None:
    """Calls `work(start, stop)` on as many slices of `count` things as torch has threads; on the first, right here.

    Each thing has `each` numbers to go through: a few numbers are not worth a thread.
    """
    slices = max(1, min(count, torch.get_num_threads(), count * each // _WORTH_A_THREAD))
    edges = [count * part // slices for part in range(slices + 1)]
    others = [_threads().submit(work, edges[part], edges[part + 1]) for part in range(1, slices)]
    try:
        work(edges[0], edges[1])
    finally:
        for other in others:
            other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="attnmech")


if hasattr(os, "register_at_fork"):
    # A forked process has the pool without its threads.
    os.register_at_fork(after_in_child=_threads.cache_clear)
