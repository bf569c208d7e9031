"""Where are the scores of a block of rows put? Where those of an earlier block were, once nobody holds these."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_holders: Final[Callable[[Any], int] | None] = getattr(torch._C, "_storage_Use_Count", None)
"""How many hold a storage; without it, no room is used again."""


class Rooms:
    """Memory for tensors of up to so many numbers, or of as many as the largest so far.

    Fresh memory costs a page fault for every 4 kB, and an allocator keeps what was freed of blocks that grow.
    """

    def __init__(self, cells: int, like: Tensor) -> None:
        self._cells, self._like = cells, like
        self._rooms: list[tuple[Tensor, int]] = []

    def take(self, *shape: int) -> Tensor:
        """An uninitialised tensor that nobody else holds."""
        size = torch.Size(shape)
        if size.numel() > self._cells:
            self._cells, self._rooms = size.numel(), []
        room = next((room for room, alone in self._rooms if _held(room) == alone), None)
        if room is None:
            room = self._like.new_empty(self._cells)
            if _holders is not None:
                self._rooms.append((room, _held(room)))
        return room[: size.numel()].view(size)


def _held(room: Tensor) -> int:
    assert _holders is not None
    return _holders(room.untyped_storage()._cdata)
