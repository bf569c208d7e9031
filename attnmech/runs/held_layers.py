"""Holds the numbers of layers until several are added together; on short texts, a step costs more than its work."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import torch

from ..maths.blocks import block_bytes
from .reducer import Run, State

Kind = TypeVar("Kind", bound=Hashable)
Value = TypeVar("Value")


class HeldLayers(Generic[Kind, Value]):
    """The layers of one batch that a reducer has still to add, by kind: only layers of one kind are added together."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind, dict[int, Value]] = {}

    @classmethod
    def of(cls, state: State, run: Run) -> "HeldLayers[Kind, Value]":
        """The held layers of the reducer with this state."""
        held: HeldLayers[Kind, Value] = run.between.setdefault((id(state["classes"]), cls), cls())
        return held

    def add(self, kind: Kind, layer: int, value: Value, size: int, device: torch.device) -> dict[int, Value]:
        """Holds a layer, whose numbers take `size` bytes; returns the layers of its kind once they fill a block."""
        layers = self._by_kind.setdefault(kind, {})
        layers[layer] = value
        return self._by_kind.pop(kind) if (len(layers) + 1) * size > block_bytes(device) else {}

    def rest(self) -> Iterator[tuple[Kind, dict[int, Value]]]:
        """The layers that are left, kind by kind."""
        while self._by_kind:
            yield self._by_kind.popitem()
