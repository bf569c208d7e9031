"""Counts the tokens of texts, and sums the factors of the norms behind attention and before the logits."""

from dataclasses import dataclass

import torch

from ...maths.float64 import as_float64, float64_device
from ...model.attention.observed import LayerEnd
from ...model.reading.unembedding import unembedding_of
from ...model.stack.block import attention_scale
from ...runs.reducer import Reducer, Run, State
from ...runs.token_types import ROW_CLASSES, row_classes


@dataclass(frozen=True)
class ScaleSums(Reducer):
    """Counts the ordinary tokens of texts (neither special nor first) by id, and sums two factors over their rows."""

    normed: bool
    """Whether there is a norm between attention and stream."""

    @property
    def points(self) -> tuple[str, ...]:  # type: ignore[override]
        """The points from which the factors are computed."""
        return ("resid_post", "attn_raw", "attn_out") if self.normed else ("resid_post",)

    def start(self, run: Run) -> State:
        """No rows yet."""
        device = run.model.device
        sums_on = float64_device(device)
        return {
            "counts": torch.zeros(run.model.n_vocab, dtype=torch.long, device=device),
            "rows": torch.zeros(1, dtype=torch.long, device=device),
            "final": torch.zeros(1, dtype=torch.float64, device=sums_on),
            "attention": torch.zeros(run.n_layers, dtype=torch.float64, device=sums_on),
        }

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds a layer's factor and, at the last layer, the tokens and the factor of the final norm."""
        batch = run.batch.queries(run.stack.label)
        ordinary = row_classes(batch)[:, ROW_CLASSES.index("ordinary")]
        if self.normed:
            precision = torch.promote_types(run.model.dtype, torch.float32)
            factor = attention_scale(run.stack, end, precision).by_token
            state["attention"][end.index] += as_float64(factor[ordinary]).sum()
        if end.index < run.n_layers - 1:
            return
        state["counts"] += torch.bincount(batch.ids[ordinary], minlength=len(state["counts"]))
        state["rows"] += ordinary.sum()
        state["final"] += as_float64(unembedding_of(run.model).scale(end["resid_post"])[ordinary]).sum()

    def merge(self, one: State, other: State) -> State:
        """The sums of both."""
        return {name: one[name] + other[name] for name in one}
