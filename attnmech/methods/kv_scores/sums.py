"""Sums the attention to the first keys, to the last keys and to those between, in rows that have keys between."""

from dataclasses import dataclass
from typing import Final

import torch

from ...maths.float64 import as_float64, float64_device
from ...model.attention.observed import RowBlock
from ...runs.reducer import Reducer, Run, State
from ...runs.retrieval import in_order

PARTS: Final = ("sink", "recency", "between")  # of a row's keys: the first, the last, and all others


@dataclass(frozen=True)
class KeyParts(Reducer):
    """Sums, by text, the attention to the `first` keys, to the `last` keys up to the row's own, and to the others."""

    first: int
    last: int

    def start(self, run: Run) -> State:
        """Empty sums, and the number of rows of each text that have keys between the first and the last."""
        device, texts = float64_device(run.model.device), len(run.batch.ids)
        sums = torch.zeros(texts, len(PARTS), run.n_layers, run.n_heads, dtype=torch.float64, device=device)
        batch = run.batch.queries(run.stack.label)
        counted = batch.mask & (batch.places >= self.first + self.last)
        return {"sums": sums, "rows": as_float64(counted.sum(dim=-1)), "documents": run.documents.clone()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows."""
        places = block.batch.queries(block.stack).places
        rows, keys = places[:, block.rows.start : block.rows.stop, None], places[:, None, : block.pattern.shape[-1]]
        counted = block.real[..., None] & (rows >= self.first + self.last)
        sink, recent = keys < self.first, keys > rows - self.last
        pattern = block.pattern[..., : keys.shape[-1]]  # further keys are not tokens
        for part, kept in enumerate((sink, recent, ~sink & ~recent)):
            attended = (pattern * (kept & counted)[:, None]).sum(dim=-1)
            state["sums"][:, part, block.index] += as_float64(attended).sum(dim=-1)

    def merge(self, one: State, other: State) -> State:
        """The sums of both, in the order of the texts."""
        return in_order(one, other, axis=0)
