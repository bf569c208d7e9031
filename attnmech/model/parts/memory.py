"""Recognises errors that mean the device has too little memory."""

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch

from ...basics.messages import first_line
from ...errors import DeviceMemoryError

P = ParamSpec("P")
R = TypeVar("R")


_HINT: Final = 'Load the model in 16 bits (dtype="bfloat16") or on another device (device="cpu").'


def names_lack_of_memory(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function raise `DeviceMemoryError` if the device runs out of memory, whatever error that causes.

    The error refers to no frame of the failed call, so nothing stays allocated.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            lack = _lack_of_memory(error)
            if lack is None:
                raise
        raise DeviceMemoryError(f"the device has too little memory: {lack.rstrip('.')}. {_HINT}")

    return called


def _lack_of_memory(error: BaseException | None) -> str | None:
    """The message of the first out-of-memory error, in an error and the chain that it was raised from."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return None if error is None else first_line(error)
