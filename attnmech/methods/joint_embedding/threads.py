"""How are heads measured side by side? In as many threads as torch uses, each without threads of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Found = TypeVar("Found")


def in_threads(measure: Callable[[int], Found], count: int) -> list[Found]:
    """What `measure` returns for 0, 1, …, `count` − 1, in order; it must neither change what is shared nor draw.

    Threads of torch within several threads would wait for one another: on two cores that takes three times as long.

    >>> in_threads(lambda number: number**2, 4)
    [0, 1, 4, 9]
    """
    threads = torch.get_num_threads()
    if min(threads, count) < 2:
        return [measure(number) for number in range(count)]
    try:
        with (
            threadpool_limits(1, user_api="blas"),
            ThreadPoolExecutor(threads, initializer=_alone) as pool,
        ):
            return list(pool.map(measure, range(count)))
    finally:
        torch.set_num_threads(threads)  # which threads made later begin with


def _alone() -> None:
    """No further threads for what this thread calls: torch and OpenMP keep their number thread by thread."""
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="openmp")
