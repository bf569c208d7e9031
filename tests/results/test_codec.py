"""Converting a dataclass to tensors and JSON values, and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnmech.results.codec import packed, unpacked


@dataclass(frozen=True)
class Part:
    scale: float
    seen: Float[Tensor, " token"]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Whole:
    layers: tuple[int, ...]
    pairs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    label: str | None
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part]
    state: Mapping[str, Tensor]
    provenance: str
    options: Mapping[str, Any] = field(default_factory=dict)


def whole() -> Whole:
    one, other = Part(0.5, torch.tensor([1.0, 2.0])), Part(2.0, torch.tensor([3.0]), torch.zeros(2))
    return Whole((3, 0), (((0, 1), (2, 3)),), None, (one, other), {"zero value": other}, {"sums": torch.ones(1)}, "x")


def test_nested_parts_come_back_as_they_were() -> None:
    tensors, facts = packed(whole())
    assert set(tensors) == {
        "parts.0.seen", "parts.1.seen", "parts.1.bias", "by_name.zero value.seen", "by_name.zero value.bias",
        "state.sums",
    }  # fmt: skip
    assert facts["pairs"] == [[[0, 1], [2, 3]]] and facts["parts"][1]["scale"] == 2.0 and "provenance" not in facts
    again = unpacked(Whole, tensors, facts, provenance="y")
    assert again.provenance == "y" and again.layers == (3, 0) and again.pairs == whole().pairs and again.label is None
    assert [part.scale for part in again.parts] == [0.5, 2.0] and again.parts[0].bias is None
    assert torch.equal(again.parts[1].bias, torch.zeros(2)) and torch.equal(again.state["sums"], torch.ones(1))
    assert again.by_name["zero value"].scale == 2.0
