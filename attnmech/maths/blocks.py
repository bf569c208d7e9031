"""The size of the blocks that a device works on: what its fastest memory holds together with their neighbours."""

from typing import Final

import torch

_BYTES: Final = {"cpu": 8 * 2**20}
"""The size by type of device; other types use the CPU's."""


def block_bytes(device: torch.device) -> int:
    """The size of the largest array of a step: a block of scores, or the products of a stream with the heads' W_O.

    >>> block_bytes(torch.device("cpu")) // 2**20
    8
    """
    return _BYTES.get(device.type, _BYTES["cpu"])
