"""Computes each head's mean query and mean key on a corpus, as a reference at which scores are split.

Formulas: docs/formulas.md#centred-terms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack

import torch
from einops import rearrange

from ..basics.arguments import flag
from ..basics.public import public
from ..batch import Batch
from ..errors import InputError
from ..maths.float64 import put
from ..model.attention.observed import LayerEnd
from ..model.inputs.encoder import Inputs
from ..model.run.hooked import HookedModel
from ..model.stack.centring import sums_of
from ..results.mean_qk import MeanQK
from .options import StreamOptions
from .reducer import Reducer, Run, Source, State
from .states import summed_to_longer
from .stream import stream


@public
def mean_qk(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    per_position: bool = False,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> MeanQK:
    """The mean query and key of every head on some texts, for `am.decompose_scores(..., centre=means)`.

    q̄ = Σ_i q_i / N, q_i = R_i⁻¹ q_rot,i: the query that enters the score, rotated back to position 0; k̄ likewise, for
    kv heads.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> model = am.load()
    >>> means = am.mean_qk(model, documents(6))                              # or am.Corpus("corpus.txt")
    >>> split = am.decompose_scores(model, "Anna sang of shells.", centre=means)

    Args:
        model: the model; hooks in force change the means.
        inputs: texts, or an iterator of texts (a corpus); only sums are kept.
        per_position: whether to take a mean at each position, which needs 50 texts at each position used (Song & Zhong
            2023, arXiv 2310.04861); by default, one mean per head, over all tokens except special tokens and the first
            of each text.
        layers: the layers; by default all.
        stack: "encoder", "decoder" or "cross" in a model with several.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Sums and counts, `[layer place head d_head]`, with `mean_query` and `mean_key`; `save` and `merged`.

    Raises:
        InputError: for texts without any token that counts.

    """
    flag("per_position", per_position)
    means: MeanQK
    (means,) = stream(model, inputs, [MeanQKReducer(per_position)], layers=layers, stack=stack, **options)
    return means


@dataclass(frozen=True)
class MeanQKReducer(Reducer):
    """Sums the queries and keys that enter the scores, rotated back."""

    per_position: bool = False

    points = ("q", "k")
    optional_points = ("q_rot", "k_rot")

    def start(self, run: Run) -> State:
        """Sums for each layer, and counts, which all layers share."""
        state = {"texts": run.batch.digests}
        for name, batch, heads in _roles(run):
            places = batch.ids.shape[1] if self.per_position else 1
            state[f"{name}_sums"] = torch.zeros(run.n_layers, places, heads, run.stack.d_head, dtype=torch.float64)
            state[f"{name}_counts"] = torch.zeros(places, dtype=torch.long)
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        rotation = run.stack.rotation(end.layer, end.notes)
        for name, batch, _ in _roles(run):
            point = name[0] if f"{name[0]}_rot" not in end else f"{name[0]}_rot"
            value = rearrange(end[point], "batch position head d_head -> batch head position d_head")
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            value = value if rotation is None else rotation.back(value)
            sums, counts = sums_of(value, batch, by_position=self.per_position)
            state[f"{name}_sums"][end.index] = sums.sum(dim=0)
            if end.index == 0:
                state[f"{name}_counts"] += counts.sum(dim=0).to(state[f"{name}_counts"].device)

    def merge(self, one: State, other: State) -> State:
        """The sums of both; positions extend to the longer text."""
        sums = {"texts": torch.cat((one["texts"], other["texts"]))}
        for name in one.keys() - sums.keys():
            sums[name] = summed_to_longer(one[name], other[name], axis=1 if name.endswith("_sums") else 0)
        return sums

    def finish(self, state: State, source: Source) -> MeanQK:
        """The result; raises `InputError` if no token counts."""
        if not state["query_counts"].sum() or not state["key_counts"].sum():
            raise InputError(
                "the texts have only first and special tokens, so there is nothing to take a mean over; give longer "
                "texts."
            )
        return MeanQK(
            per_position=self.per_position,
            layers=source.layers,
            n_layers=len(source.stack.places),
            stack=source.stack.label,
            provenance=source.provenance,
            **state | {"texts": state["texts"].sort().values},
        )


def _roles(run: Run) -> tuple[tuple[str, Batch, int], ...]:
    """The queries and the keys of a batch, each with its number of heads."""
    label = run.stack.label
    return ("query", run.batch.queries(label), run.n_heads), ("key", run.batch.key_tokens(label), run.stack.n_kv_heads)
