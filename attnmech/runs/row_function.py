"""Makes a reducer of a plain function of a block of rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..basics.arguments import shown
from ..errors import ReducerError
from ..maths.intervals import TextMeans
from ..model.attention.observed import RowBlock
from .identity import digest_of
from .reducer import Reducer, Run, Source, State


class RowFunction(Reducer):
    """Averages over all rows what a function of a block returns, `[batch head row]`; intervals are over texts."""

    def __init__(self, function: Callable[[RowBlock], Tensor]) -> None:
        self.function = function

    @property
    def options(self) -> dict[str, str]:
        return {"function": digest_of(self.function)}

    def start(self, run: Run) -> State:
        shape = run.n_layers, run.n_heads, len(run.batch.ids)
        return {name: torch.zeros(shape, device=run.model.device) for name in ("sums", "rows")}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        values, wanted = self.function(block), [*block.q.shape[:3]]
        if not isinstance(values, Tensor) or [*values.shape] != wanted:
            raise ReducerError(
                f"a function in `reducers` must return a number for each text, head and row, {wanted}, such as "
                f"block.pattern.amax(-1); got {shown(values)}. For anything else, subclass am.Reducer."
            )
        state["sums"][block.index] += values.float().masked_fill(~block.real[:, None], 0.0).sum(dim=-1).T
        state["rows"][block.index] += block.real.sum(dim=-1)

    def merge(self, one: State, other: State) -> State:
        return {name: torch.cat([one[name], other[name]], dim=-1) for name in one}

    def finish(self, state: State, source: Source) -> TextMeans:
        copies: Sequence[int] = source.provenance.copies
        return TextMeans.of_ratio(state["sums"], state["rows"], copies)
