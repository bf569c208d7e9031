"""Tells a device with too little memory from a model at fault."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ...basics.messages import first_line
from ...errors import DeviceMemoryError

P = ParamSpec("P")
R = TypeVar("R")


def names_lack_of_memory(hint: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function raise `DeviceMemoryError` with a hint if the device runs out of memory, whatever became of it.

    The error holds no frame of what failed, so nothing stays allocated.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                lack = _lack_of_memory(error)
                if lack is None:
                    raise
            raise DeviceMemoryError(f"the device has too little memory: {lack.rstrip('.')}. {hint}")

        return called

    return decorated


def _lack_of_memory(error: BaseException | None) -> str | None:
    """What the first such error says, among an error and those that it was raised from."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return None if error is None else first_line(error)
