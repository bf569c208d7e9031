"""Observes attention under changes: measures how far patterns move, and counts rows left without keys."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..maths.divergence import jensen_shannon
from ..maths.float64 import as_float64
from ..model.attention.observed import RowBlock
from ..model.run.hooked import HookedModel


class Keyless:
    """Counts the rows of real tokens, over heads and layers, that see no key and so attend to nothing."""

    def __init__(self, texts: int, changes: int) -> None:
        self.counts = torch.zeros(changes, texts, dtype=torch.long)

    def __call__(self, block: RowBlock) -> None:
        hidden = (block.scores == torch.finfo(block.scores.dtype).min).all(dim=-1)
        empty = hidden & (block.pattern == 0).all(dim=-1) & block.real[:, None]
        copies = rearrange(empty.sum(dim=(1, 2)).cpu(), "(copy text) -> copy text", text=self.counts.shape[1])
        # Rows of the unchanged first copy are not counted.
        self.counts += copies[-len(self.counts) :]


class PatternShifts:
    """Sums the divergence of the patterns in changed copies from the patterns in the first copy."""

    def __init__(self, model: HookedModel, texts: int, changes: int, start: int) -> None:
        stack = model.output_stack
        self.layers = [(stack.label, layer) for layer in stack.layers if layer >= start]
        self._below = len(stack.layers) - len(self.layers)
        self._texts, self._changes = texts, changes
        self._sums = torch.zeros(changes, texts, len(stack.layers), stack.n_heads, dtype=torch.float64)
        self._rows = torch.zeros(texts, dtype=torch.float64)

    def __call__(self, block: RowBlock) -> None:
        copies = rearrange(block.attention.pattern, "(copy text) ... -> copy text ...", text=self._texts)
        real = block.real[: self._texts].cpu()
        distance = (
            as_float64(jensen_shannon(copies[1:], copies[:1].expand_as(copies[1:])))
            .cpu()
            .masked_fill(~real[:, None], 0.0)
        )
        self._sums[:, :, self._below + block.index] += distance.sum(dim=-1)
        if block.index == 0:
            self._rows += real.sum(dim=1)

    def means(self) -> Float[Tensor, "change text layer head"]:
        """The mean over rows."""
        return self._sums / self._rows[:, None, None]
