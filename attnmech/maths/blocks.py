"""The size of the blocks that a device works on.

On the CPU, what its fastest memory holds together with their neighbours; elsewhere, a share of the free memory, since a
launch takes as long as work on a few MiB.
"""

from typing import Final

import torch

_CACHED: Final = 8 * 2**20
_UNKNOWN: Final = 256 * 2**20
"""On devices that do not say how much memory is free."""
_MOST: Final = 2**30
_SHARE: Final = 16
"""The number of such blocks that free memory holds; a layer needs about six at the same time."""


def block_bytes(device: torch.device) -> int:
    """The size of the largest array of a step: a block of scores, or the products of a stream with the heads' W_O.

    >>> block_bytes(torch.device("cpu")) // 2**20
    8
    """
    if device.type == "cpu":
        return _CACHED
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return _UNKNOWN
    free, _ = module.mem_get_info(device)
    # A power of two: blocks, and so the rounding of sums, do not change with every tensor that is freed.
    return int(min(max(2 ** (free // _SHARE).bit_length() // 2, _CACHED), _MOST))
