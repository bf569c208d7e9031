"""Sums that compare heads, taken in one pass: where heads attend, what they write, and attention beyond a distance."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from ...maths.float64 import as_float64, put
from ...model.attention.observed import LayerEnd, RowBlock
from ...runs.focus_sums import FocusSums
from ...runs.groups import by_group, joined
from ...runs.reducer import Reducer, Run, State
from ...runs.token_types import ROW_CLASSES, row_classes
from ...runs.update_sums import UpdateSums

FAR: Final = ("far", "far_ordinary")
"""The two measures of attention beyond a distance: to all keys, and to all keys except the text's first token."""

_PARTS: Final[Mapping[str, Reducer]] = {"focus": FocusSums(), "updates": UpdateSums()}
_BY_TEXT: Final = (
    "far_mass", "far_uniform", "far_rows", "focus_sums", "focus_counts", "update_sums", "update_counts",
)  # fmt: skip


@dataclass(frozen=True)
class OddHeadSums(Reducer):
    """Takes the sums of `am.attention_focus` and `am.residual_updates`, and sums attention beyond a distance."""

    beyond: int = 16

    points = UpdateSums.points
    optional_points = UpdateSums.optional_points

    def start(self, run: Run) -> State:
        """Sums of 0 for all parts, with the part's name before each entry's name."""
        texts = len(run.documents)
        far = {
            "mass": torch.zeros(len(FAR), run.n_layers, run.n_heads, texts, dtype=torch.float64),
            "uniform": torch.zeros(len(FAR), run.n_layers, texts, dtype=torch.float64),
            "rows": torch.zeros(len(FAR), run.n_layers, texts, dtype=torch.float64),
        }
        of_parts = {name: part.start(_as_corpus(run)) for name, part in _PARTS.items()}
        of_parts["far"] = {name: put(value, run.model.device) for name, value in far.items()}
        return {f"{part} {name}": value for part, state in of_parts.items() for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows."""
        for name, part in _PARTS.items():
            part.add(_of(state, name), block, _as_corpus(run))
        self._add_far(_of(state, "far"), block)

    def _add_far(self, far: State, block: RowBlock) -> None:
        batch = block.batch.queries(block.stack)
        # The first row of a text does not count, here as elsewhere.
        classes = row_classes(batch)[:, : ROW_CLASSES.index("first"), block.rows.start : block.rows.stop].any(dim=1)
        seen = block.visible[:, 0]
        keys = torch.arange(seen.shape[-1], device=seen.device)
        rows = torch.arange(block.rows.start, block.rows.stop, device=seen.device)
        beyond = seen & ((rows[:, None] - keys).abs() >= self.beyond)
        first = batch.first[:, None, : seen.shape[-1]]
        for place, some in enumerate((beyond, beyond & ~first)):
            counted = classes & some.any(dim=-1)
            chosen = some & counted[..., None]
            mass = torch.einsum("thrk,trk->ht", block.pattern, chosen.to(block.pattern))
            share = as_float64(chosen.sum(dim=-1)) / as_float64(seen.sum(dim=-1).clamp_min(1))
            far["mass"][place, block.index] += as_float64(mass)
            far["uniform"][place, block.index] += share.sum(dim=-1)
            far["rows"][place, block.index] += as_float64(counted.sum(dim=-1))

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds the sums of what a layer's heads wrote."""
        _PARTS["updates"].add_layer(_of(state, "updates"), end, _as_corpus(run))

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts."""
        whole = _as_corpus(run)
        focus, updates = (part.close(_of(state, name), whole) for name, part in _PARTS.items())
        far = {f"far_{name}": value.cpu() for name, value in _of(state, "far").items()}
        return by_group(far, run.batch.digests, tuple(far)) | {
            "focus_sums": focus["sums"],
            "focus_counts": focus["counts"],
            "update_sums": updates["sums"],
            "update_counts": updates["counts"],
        }

    def merge(self, one: State, other: State) -> State:
        """The sums of both."""
        return joined(one, other, _BY_TEXT)


def _of(state: State, part: str) -> State:
    """The tensors of one part; changing them in place changes the state."""
    beginning = f"{part} "
    return {name.removeprefix(beginning): value for name, value in state.items() if name.startswith(beginning)}


def _as_corpus(run: Run) -> Run:
    """The same run, marked as a corpus so that no rows are stored."""
    return replace(run, corpus=True)
