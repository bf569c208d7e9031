"""Computes a metric from the output of a pass; logits are computed only for the tokens that need them, some at a
time.

Also observes attention under changes: measures how far patterns move, and counts rows left without keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..batch import Batch
from ..maths.divergence import jensen_shannon
from ..maths.float64 import as_float64, float64_device
from ..model.attention.observed import RowBlock
from ..model.reading.partial_pass import Blocks
from ..model.run.hooked import HookedModel
from .metrics import Metric


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
        return self._sums / self._rows[:, None, None]


@dataclass(frozen=True)
class Output:
    """The output of a pass over copies of a batch: the final stream, if logits follow from it later, else logits."""

    stream: Float[Tensor, "rows position d_model"] | None
    logits: Float[Tensor, "*output"] | None


@dataclass(frozen=True)
class Judging:
    """Computes a metric from the output of copies of a batch."""

    batch: Batch
    queries: Batch  # the batch whose tokens the rows of the output belong to
    blocks: Blocks | None  # computes logits from streams; None if the outputs are logits already
    clean: Output
    rows_at_once: int  # the number of tokens with logits that fit into the memory

    def of(self, output: Output, count: int, judge: Metric) -> Float[Tensor, "copy batch"]:
        if judge.compute is not None or judge.of_output:  # which need the full output, not only rows of logits
            if output is self.clean:
                judge.require_own_texts(self._logits(output, 0), self.queries)
            unchanged = self._logits(self.clean, 0) if judge.needs_clean else None
            return torch.stack(
                [judge.of_whole(self._logits(output, copy), self.queries, unchanged) for copy in range(count)]
            ).cpu()
        rows = judge.rows(self.queries).nonzero()
        sums = torch.zeros(count, len(self.queries.ids), dtype=torch.float64, device=float64_device(rows.device))
        text = rows[:, 0].to(sums.device)
        by_row = output.stream is not None and self.blocks is not None and self.blocks.by_row
        at_once = self.rows_at_once // (count + int(judge.needs_clean)) if by_row else len(rows)
        for some, texts in zip(torch.split(rows, max(1, at_once)), torch.split(text, max(1, at_once)), strict=True):
            clean = self._rows(self.clean, 1, some)[0] if judge.needs_clean else None
            for copy, logits in enumerate(self._rows(output, count, some)):
                sums[copy].index_add_(0, texts, as_float64(judge.of_rows(logits, clean, self.queries, some)))
        return (sums / torch.bincount(text, minlength=len(self.queries.ids))).cpu()

    def _rows(self, output: Output, count: int, rows: Int[Tensor, "row 2"]) -> Sequence[Float[Tensor, "row vocab"]]:
        text, position = rows.unbind(dim=1)
        if output.stream is not None and self.blocks is not None and self.blocks.by_row:
            streams = rearrange(output.stream, "(copy text) ... -> copy text ...", copy=count)[:, text, position]
            logits = self.blocks.logits_of_rows(rearrange(streams, "copy row d_model -> (copy row) d_model"))
            return list(rearrange(logits, "(copy row) vocab -> copy row vocab", copy=count))
        return [self._logits(output, copy)[text, position] for copy in range(count)]

    def _logits(self, output: Output, copy: int) -> Float[Tensor, "*output"]:
        texts = slice(copy * len(self.batch.ids), (copy + 1) * len(self.batch.ids))
        if output.logits is not None:
            return output.logits[texts]
        assert output.stream is not None and self.blocks is not None
        return self.blocks.logits(self.batch, output.stream[texts])
