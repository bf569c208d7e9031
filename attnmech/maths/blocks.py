"""How much is worked on at a time? As much as the fastest memory of a device holds with its neighbours."""

from typing import Final

import torch

_BYTES: Final = {"cpu": 8 * 2**20}
"""By type of device; others are given the CPU's."""


def block_bytes(device: torch.device) -> int:
    """How large the largest array of a step should be: a block of scores, or what heads see of a stream.

    >>> block_bytes(torch.device("cpu")) // 2**20
    8
    """
    return _BYTES.get(device.type, _BYTES["cpu"])
