"""The size of the blocks that a device works on.

On the CPU, a block and its neighbours fit into the fastest memory; on other devices, a block is so large that a launch
takes far less time than the work that it starts.
"""

import time
from functools import lru_cache
from typing import Final

import torch

_ON_CPU: Final = 8 * 2**20
_ELSEWHERE: Final = 256 * 2**20
_SHARE: Final = 16  # the number of blocks that must fit into free memory; a layer needs about six at the same time


def block_bytes(device: torch.device) -> int:
    """Returns the size of a step's largest array: a block of scores, or the products of a stream with the heads' W_O.

    >>> block_bytes(torch.device("cpu")) // 2**20
    8
    """
    return _ON_CPU if device.type == "cpu" else min(_ELSEWHERE, _share(device, int(time.monotonic())))


@lru_cache(maxsize=16)
def _share(device: torch.device, _second: int) -> int:
    """A share of a device's free memory, which is queried at most once a second, since drivers may answer slowly."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return _ELSEWHERE
    free, _ = module.mem_get_info(device)
    return max(_ON_CPU, int(free) // _SHARE)
