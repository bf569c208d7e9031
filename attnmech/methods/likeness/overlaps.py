"""Measures how much the attention of any two heads overlaps, on sampled rows of a corpus; memory does not grow.

Formula: docs/formulas.md#similar-heads.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from ...maths.float64 import as_float64, put
from ...model.attention.observed import RowBlock
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.token_types import ROW_CLASSES, row_classes
from .divergences import sampled_rows, with_sink

ROWS: Final = 8
"""The number of rows of each text on which heads are compared."""


@dataclass(frozen=True)
class OverlapReducer(Reducer):
    """Sums Σ_j √(p_ij q_ij) over sampled rows i, for any two heads."""

    seed: int = 0

    def start(self, run: Run) -> State:
        """Sums of 0, the sampled rows, and no attention yet."""
        label = run.stack.label
        batch, keys = run.batch.queries(label), run.batch.keys(label).ids.shape[1]
        ordinary = row_classes(batch)[:, ROW_CLASSES.index("ordinary")]
        place = sampled_rows(ordinary, run.batch.digests, ROWS, self.seed)
        state = {
            "sums": torch.zeros(run.n_layers, run.n_heads, run.n_layers, run.n_heads, dtype=torch.float64),
            "rows": torch.zeros(run.n_layers, run.n_layers, dtype=torch.float64),
            "place": place,
            "seen": torch.zeros(run.n_layers, *place.shape, dtype=torch.bool),
            # One column besides the keys stores a sink's share.
            "roots": torch.zeros(run.n_layers, run.n_heads, *place.shape, keys + 1, dtype=torch.float32),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Keeps the square roots of the sampled rows of a block."""
        place = state["place"]
        text, sample = ((place >= block.rows.start) & (place < block.rows.stop)).nonzero(as_tuple=True)
        row = place[text, sample] - block.rows.start
        several = block.visible[text, 0, row].sum(dim=-1) >= 2
        pattern = with_sink(block)[text, :, row] * several[:, None, None]
        state["seen"][block.index, text, sample] = several
        state["roots"][block.index, :, text, sample, : pattern.shape[-1]] = pattern.sqrt().transpose(0, 1).float()

    def close(self, state: State, run: Run) -> State:
        """The sums over the batch's rows."""
        flat = state["roots"].flatten(2).flatten(0, 1)
        seen = as_float64(state["seen"].flatten(1))
        return {"sums": as_float64(flat @ flat.T).view_as(state["sums"]), "rows": seen @ seen.T}

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}

    def finish(self, state: State, source: Source) -> Float[Tensor, "head_of_all head_of_all"]:
        """The mean overlap of any two heads, counted layer by layer; NaN between a head and itself."""
        overlap: Tensor = (state["sums"] / state["rows"][:, None, :, None]).flatten(2).flatten(0, 1)
        return overlap.fill_diagonal_(torch.nan)
