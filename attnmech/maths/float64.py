"""Numbers in float64: on their own device, or on the CPU where the device has no float64 (Apple's MPS).

Float64 results do not depend on the device; the CPU waits only for devices without float64.
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

_HAVE: Final = ("cpu", "cuda", "meta")  # the types of devices that are known to have float64


def as_float64(value: Tensor) -> Tensor:
    """A tensor in float64, on `float64_device` of its device.

    >>> as_float64(torch.ones(1)).dtype
    torch.float64
    """
    return in_precision(value, torch.float64)


def in_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in some precision: on its own device or, in float64, on `float64_device` of it."""
    return put(value, value.device, dtype)


def put(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device or, in float64, on `float64_device` of it."""
    dtype = value.dtype if dtype is None else dtype
    if dtype != torch.float64:
        return value.to(device, dtype)
    # Moved before it is converted: its own device may not have float64.
    return value.to(float64_device(device)).to(dtype)


def float64_device(device: torch.device) -> torch.device:
    """The device that computes in float64 what lies on `device`: itself or, if it has no float64, the CPU.

    >>> float64_device(torch.device("cpu"))
    device(type='cpu')
    """
    return device if device.type in _HAVE or _computes(device) else torch.device("cpu")


@cache
def _computes(device: torch.device) -> bool:
    """Whether a device adds two float64 numbers."""
    try:
        return float(torch.ones(1, dtype=torch.float64, device=device) + 1) == 2
    except (RuntimeError, TypeError):  # MPS refuses the type, some of Intel's GPUs the kernel
        return False
