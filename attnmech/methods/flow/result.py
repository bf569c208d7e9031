"""Maps of where a token's information comes from: rollout, and attention weighted by values or gradients.

Formulas: docs/formulas.md#information-flow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import index_of, member, option, whole_number
from ...basics.public import public
from ...batch import Batch
from ...draw.all_heads import model_view
from ...draw.embed import View
from ...draw.graph import token_graph
from ...draw.patterns import VALUE_WEIGHTED, Measure
from ...draw.section import Section
from ...draw.segments import segment_map
from ...draw.sentence import sentence_view
from ...draw.text import percent, quoted, signed, token_labels
from ...errors import InputError
from ...maths.float64 import put
from ...maths.flow import positive_part, rolled_out, summed_norms, value_norms
from ...maths.norms import norm_multiplier
from ...model.attention.observed import LayerEnd, RowBlock
from ...model.inputs.encoder import Inputs
from ...model.inputs.encoders import tokenized
from ...model.parts.hashes import batch_hash
from ...model.parts.norms import gamma_of, is_centred
from ...model.parts.weights import bias_of
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.block import attention_scale
from ...model.stack.carried import output_weights
from ...results.by_layer import table_of
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...results.sentences import in_words
from ...results.table import require_one_figure
from ...runs.answers import Answers
from ...runs.corpus import CorpusBatch
from ...runs.gradients import differentiated
from ...runs.judged import JudgedTexts
from ...runs.metrics import Metric, MetricLike
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.stream import stream


def weighted_gradients(
    model: HookedModel, batch: Batch, judge: Metric, layers: Sequence[int]
) -> Float[Tensor, "layer head query key"]:
    """Computes p ⊙ ∂metric/∂p of one text, between its real tokens, without padding.

    The derivative varies each p_ij alone, so that rows no longer sum to 1, and everything computed from p_ij follows.
    For the loss of a masked language model, the result is the mean over the masked copies of the text, weighted by
    their masked tokens.
    """
    judged = JudgedTexts.of([CorpusBatch(batch, torch.tensor([0]), 0, "")], judge, batch.ids.numel())
    weights = torch.ones(1) if judged.masked is None else judged.masked.double() / judged.masked.sum()
    stack, wide = model.output_stack, torch.promote_types(model.dtype, torch.float32)
    point = stack.point("pattern")

    def of_part(part: CorpusBatch) -> Tensor:
        judge = judged.judge.at(part.documents)
        _, ran, slope = differentiated(model, part.batch, judge, [point], layers, torch.tensor([0]))
        real = part.batch.queries(stack.label).mask[0]
        products = (ran[point, layer][0].to(wide) * slope[point, layer][0].to(wide) for layer in layers)
        return torch.stack([product[:, real][..., real].cpu() for product in products])

    of_parts = (weight * of_part(part) for part, weight in zip(judged.parts, weights.tolist(), strict=True))
    return sum(of_parts, start=torch.zeros(()))


METHODS: Final = ("rollout", "norm", "norm_residual", "gradient")
MOST_BYTES: Final = 1_000_000_000  # the largest size of a text's maps, in bytes
VIEWS: Final = {"model": model_view, "sentence": sentence_view, "token_graph": token_graph}


@public
def attention_flow(
    model: HookedModel,
    inputs: Inputs,
    method: str = "rollout",
    *,
    metric: MetricLike | None = None,
    layers: Iterable[int] | None = None,
    answers: Answers = None,
    against: Answers = None,
    bos: bool | None = None,
) -> "AttentionFlow":
    """Maps [query key] what flows from token to token, weighting the probabilities p by what they carry.

    "rollout": R_l = A_l ··· A_0 with A = ½ (mean_h p + I), rows divided by their sum. R_l is the share of a token's
    stream after layer l that comes from each input token if every layer mixes streams by its mean pattern. "norm":
    ‖p_ij f(x_j)‖ of each head (`head_maps`) and ‖Σ_h p_ij f(x_j)‖, with f(x_j) = (x_j W_V + b_V) W_O. "norm_residual":
    ‖Σ_h p_ij f(x_j) + δ_ij x_i‖, in a post-norm model (BERT) after the norm that follows, frozen at its scale for row
    i. Where a norm sits between attention and stream (Gemma 2), its frozen scale is part of f. "gradient": p ⊙
    ∂metric/∂p of each head (`head_maps`, signed, in units of the metric), and the mean over heads of its positive part;
    over the cells of a head it sums to minus the score of `am.head_importance(method="zero")`.

    >>> import attnmech as am
    >>> flow = am.attention_flow(am.load(), "Anna sang of shells.")
    >>> flow.maps.shape, flow.maps[-1].sum(dim=-1).round(decimals=4).unique()
    (torch.Size([4, 6, 6]), tensor([1.]))

    Args:
        model: the model.
        inputs: one text.
        method: "rollout", "norm", "norm_residual" or "gradient".
        metric: for "gradient", the metric to differentiate, as in `am.head_importance`: "loss" by default,
            "logit_difference" with `answers` and `against`, or a function `(logits, batch) -> [1]`.
        layers: all by default; rollout needs all.
        answers: for "logit_difference", the correct token.
        against: the token to compare it with.
        bos: whether the text begins with the tokenizer's BOS or CLS token.

    Returns:
        One map [query key] per layer and, for "norm" and "gradient", per head.

    Raises:
        InputError: for several texts, an unknown method, `layers` with rollout, a metric without gradient or with
            another method, maps that would take more than 1 GB, and for models with several stacks or, with norms, with
            a gate or a norm between attention and W_O.

    Source: Abnar & Zuidema 2020; Kobayashi et al. 2020 and 2021; Chefer et al. 2021 and Barkan et al. 2021.

    """
    require_model(model)
    option("method", method, METHODS)
    if len(model.stacks) > 1:
        raise InputError("attention flow needs a model with one stack; this model has an encoder and a decoder.")
    if method == "rollout" and layers is not None:
        raise InputError("rollout multiplies the patterns of all layers from the first on; leave out `layers`.")
    batch, stack = model.encode(inputs, bos=bos), model.output_stack
    if method != "gradient":
        if metric is not None or answers is not None or against is not None:
            raise InputError(f'`metric`, `answers` and `against` are for method="gradient"; got method="{method}".')
        result: AttentionFlow
        (result,) = stream(model, batch, [FlowReducer(method)], layers=layers, bos=bos)
        return result
    _require_one(len(batch.ids))
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    of_text = tokenized(model.encoder, batch.queries(stack.label))
    judge = Metric.of(model, metric or "loss", answers, against, 1, of_text)
    judge.require_gradient()
    length = batch.ids.shape[1]
    size = len(chosen) * (4 * stack.n_heads + 1) * length**2 * torch.promote_types(model.dtype, torch.float32).itemsize
    _require_room(method, size, length)
    by_head = weighted_gradients(model, batch, judge, chosen)
    noted = {"method": method, "metric": judge.name, "bos": batch.bos, **judge.noted}
    provenance = model.provenance(batch_hash(batch), batch.tokens, noted)
    tokens = batch.real_tokens[0]
    return AttentionFlow(method, chosen, positive_part(by_head), by_head, tokens, provenance, judge.name)


def _require_one(texts: int) -> None:
    if texts != 1:
        raise InputError(f"flow is measured on one text at a time; got {texts} texts.")


def _require_room(method: str, size: int, length: int) -> None:
    if size <= MOST_BYTES:
        return
    fits = int(length * (MOST_BYTES / size) ** 0.5)
    raise InputError(
        f"maps of {length} tokens would take {size / 1e9:.1f} GB; the limit is {MOST_BYTES / 1e9:.0f} GB. "
        f"Give a text of up to {fits} tokens{'' if method == 'rollout' else ', or fewer `layers`'}."
    )


@dataclass(frozen=True)
class FlowReducer(Reducer):
    """Fills the maps of one text, layer by layer."""

    method: str

    points = ("v", "resid_pre", "attn_raw", "attn_out")
    optional_points = ("resid_mid",)

    def start(self, run: Run) -> State:
        """Empty maps; raises `InputError` if they would be too large."""
        _require_one(0 if run.corpus else len(run.batch.ids))
        length, heads = run.batch.ids.shape[1], 0 if self.method == "rollout" else run.n_heads
        kept = run.n_layers if self.method == "norm" else 1
        precision = torch.promote_types(run.model.dtype, torch.float32)
        size = (run.n_layers + kept * heads) * length**2 * precision.itemsize
        _require_room(self.method, size, length)
        state = {"maps": torch.zeros(run.n_layers, length, length, dtype=precision)}
        if heads:
            state["by_head"] = torch.zeros(kept, heads, length, length, dtype=precision)
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Stores the pattern, or its mean over heads."""
        rows, pattern = slice(block.rows.start, block.rows.stop), block.pattern[0]
        if self.method == "rollout":
            state["maps"][block.index, rows, : pattern.shape[-1]] = pattern.mean(dim=0)
        else:
            by_head = state["by_head"][self._place(block.index), :, rows]
            by_head[..., : pattern.shape[-1]] = pattern
            by_head[..., pattern.shape[-1] :] = 0

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Weights the pattern of a finished layer by the values that it carries."""
        if self.method == "rollout":
            return
        if end.notes.gate is not None:
            raise InputError(
                f"layer {end.layer} has a gate or a norm between attention and W_O, so f(x_j) depends on the query."
            )
        pattern = state["by_head"][self._place(end.index)]
        precision = pattern.dtype
        scale = attention_scale(run.stack, end, precision)
        W_O = output_weights(run.stack, end.layer, precision)
        v = end["v"][0].to(precision)
        values = v.repeat_interleave(len(W_O) // v.shape[1], dim=1)
        written = einsum(values, W_O, "key head d_value, head d_value d_model -> key head d_model")
        pattern *= scale.by_token[0, :, None]
        residual, factor = None, None
        if self.method == "norm_residual":
            residual = end["resid_pre"][0].to(precision)
            if run.stack.architecture.norm == "post":
                written, residual, factor = _through_norm(run, end, written, residual)
        state["maps"][end.index] = summed_norms(pattern, written, residual)
        if factor is not None:
            state["maps"][end.index] *= factor[:, None]
        pattern *= value_norms(v, W_O).T[:, None]

    def _place(self, index: int) -> int:
        """The index of a layer's maps by head; only "norm" stores the maps of every layer."""
        return index if self.method == "norm" else 0

    def close(self, state: State, run: Run) -> State:
        """Removes padding; for rollout, multiplies the layers."""
        real = run.batch.mask[0]
        maps = {name: value[..., real, :][..., real] for name, value in state.items()}
        if self.method == "rollout":
            maps["maps"] = rolled_out(maps["maps"])
        return {name: value for name, value in maps.items() if name == "maps" or self.method == "norm"}

    def merge(self, one: State, other: State) -> State:
        """Raises `InputError`: flow is measured on one text."""
        raise InputError("flow is measured on one text at a time.")

    def finish(self, state: State, source: Source) -> "AttentionFlow":
        assert source.batch is not None
        return AttentionFlow(
            method=self.method,
            layers=source.layers,
            maps=state["maps"],
            head_maps=state.get("by_head"),
            tokens=source.batch.real_tokens[0],
            provenance=source.provenance,
        )


def _through_norm(run: Run, end: LayerEnd, written: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of the stream after the norm that follows attention, and the norm's factor for each row."""
    path = run.stack.architecture.mid_norm
    assert path is not None
    norm, stream = run.stack.module(end.layer, path), end["resid_mid"]
    centred, gamma, shift = is_centred(norm, stream), gamma_of(norm, stream).to(written), bias_of(norm)
    made = norm.forward(stream).to(written)
    shift = None if shift is None else shift.detach().to(written)
    factor = norm_multiplier(stream.to(written), made, gamma, shift, centred=centred)[0]

    def through(part: Tensor) -> Tensor:
        return gamma * (part - part.mean(dim=-1, keepdim=True) if centred else part)

    return through(written), through(residual), factor


@dataclass(frozen=True, repr=False)
class AttentionFlow(PagedResult):
    """What flows from token to token in one text.

    Rollout is a share, and its rows sum to 1; norms are in units of the stream, gradients in units of the metric.
    """

    _SUBTRACT: ClassVar[str] = "subtract what you compare: one.maps - other.maps"
    _AXES: ClassVar = {"layer": "layers", "query": "tokens", "key": "tokens"}

    method: str
    """"rollout", "norm", "norm_residual" or "gradient"."""
    layers: tuple[int, ...]
    """The measured layers."""
    maps: Float[Tensor, "layer query key"]
    """For "rollout", the rollout after each layer; for norms, the norm of what all heads together carry; for
    "gradient", the positive part of p ⊙ ∂metric/∂p, averaged over heads.
    """
    head_maps: Float[Tensor, "layer head query key"] | None
    """‖p_ij f(x_j)‖ of each head for "norm", p ⊙ ∂metric/∂p for "gradient"; None for the other methods."""
    tokens: tuple[str, ...]
    provenance: Provenance
    metric: str | None = None
    """For "gradient", the differentiated metric."""

    @property
    def shares(self) -> Float[Tensor, "layer head query key"]:
        """The maps with each row divided by its sum: by head if there are maps by head, otherwise by layer. Only
        positive gradients count; a row without positive gradients is 0.
        """
        whole = self.maps[:, None] if self.head_maps is None else self.head_maps.clamp_min(0)
        return whole / whole.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(whole.dtype).tiny)

    def show(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> View:
        """Shows the shares in a view of attention: "model" (the default), "sentence" or "token_graph"."""
        make = VIEWS["model" if figure is None else option("figure", figure, VIEWS)]
        rows = list(range(len(self.layers))) if layer is None else [self._row(layer)]
        shares = self.shares[rows]
        return make(
            shares.float().numpy(),
            list(self.tokens),
            layers=[self.layers[row] for row in rows],
            head=index_of("head", 0 if head is None else head, shares.shape[1]),
            sums_to_one=False,
            measure=_MEASURES[self.method],
            title=f"{_TITLES[self.method]}, rows divided by their sums",
        ).of_model(self.provenance.model)

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        return {"layer": self.layers[-1], **super()._figure_place(*figure, **options)}

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws queries × keys of a layer (by default the last) or of a head. The figure is returned, not shown."""
        require_one_figure(figure)
        row = len(self.layers) - 1 if layer is None else self._row(layer)
        if head is not None and self.head_maps is None:
            raise InputError(f'only method="norm" and method="gradient" have maps by head; this is "{self.method}".')
        whole = self.maps[row] if self.head_maps is None or head is None else self.head_maps[row, self._head(head)]
        place = f"L{self.layers[row]}" + ("" if head is None else f"H{head}")
        return segment_map(
            whole.float().numpy(), token_labels(self.tokens), label=_LABELS[self.method], title=place,
            signs=self.method == "gradient", unit="token",
        )  # fmt: skip

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and token: layer, token, the shares of the token's row that come from `itself` and from the
        `first` token, and the token with the largest share (`top`, -1 if there is none) with its `top_share`.
        """
        shares = self._row_shares
        top = shares.max(dim=-1)
        columns = {
            "itself": shares.diagonal(dim1=1, dim2=2),
            "first": shares[..., 0],
            "top": top.indices.masked_fill(top.values <= 0, -1),
            "top_share": top.values,
        }
        return table_of({"layer": self.layers, "token": range(len(self.tokens))}, columns)

    def sources_of(self, token: int, count: int = 3) -> pd.DataFrame:
        """Lists, for each layer, the tokens from which a token gets most: layer, itself (the token's own share of its
        row's sum), and `source_1`, `share_1`, … for the `count` largest other tokens; -1 if there are fewer.
        """
        token = index_of("token", token, len(self.tokens), f"the text has {len(self.tokens)} tokens")
        count = whole_number("count", count, least=1, most=max(1, len(self.tokens) - 1))
        rows = self._row_shares[:, token].clone()
        itself = rows[:, token].tolist()
        rows[:, token] = -1
        top = rows.topk(count, dim=-1)
        columns: dict[str, list[float] | list[int]] = {}
        for place in range(count):
            positive = top.values[:, place] > 0
            columns[f"source_{place + 1}"] = top.indices[:, place].masked_fill(~positive, -1).tolist()
            columns[f"share_{place + 1}"] = top.values[:, place].clamp_min(0).tolist()
        return pd.DataFrame({"layer": list(self.layers), "itself": itself, **columns})

    @property
    def _row_shares(self) -> Float[Tensor, "layer query key"]:
        return self.maps / self.maps.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(self.maps.dtype).tiny)

    @property
    def lead(self) -> str:
        if self.method == "gradient":
            assert self.head_maps is not None and self.metric is not None
            largest = int(self.head_maps.abs().argmax())
            layer, head, query, key = (int(index) for index in np.unravel_index(largest, tuple(self.head_maps.shape)))
            value = signed(float(self.head_maps[layer, head, query, key]), ".3g")
            return (
                f"{_TITLES[self.method]} for {in_words(self.metric)}: largest in L{self.layers[layer]}H{head}, from "
                f"query {query} {quoted(self.tokens[query])} to key {key} {quoted(self.tokens[key])} ({value})."
            )
        last = self.to_frame().iloc[-1]
        return (
            f"{_TITLES[self.method]}: after layer {self.layers[-1]}, the last token gets most from token "
            f"{int(last['top'])}, {quoted(self.tokens[int(last['top'])])} ({percent(last['top_share'], 0)} of its "
            f"row), and {percent(last['itself'], 0)} from itself."
        )

    @property
    def _title(self) -> str:
        return f"{_TITLES[self.method]} of {self.provenance.short_name}"

    def _sections(self) -> list[Section]:
        return [Section("Last layer", _READING[self.method], {"flow": self.plot()}, "flow.plot()")]

    def _row(self, layer: int) -> int:
        return self.layers.index(member("layer", layer, self.layers, "the layers measured"))

    def _head(self, head: int) -> int:
        assert self.head_maps is not None
        return index_of("head", head, self.head_maps.shape[1])


_LABELS: Final = {
    "rollout": "rollout, share", "norm": "norm", "norm_residual": "norm", "gradient": "p · ∂metric/∂p"
}  # fmt: skip
"""The label of a map's colour scale."""

_TITLES: Final = {
    "rollout": "Attention rollout",
    "norm": "Norm of what attention carries",
    "norm_residual": "Norm of what attention and residual carry",
    "gradient": "Gradient-weighted attention",
}
_MEASURES: Final = {
    "rollout": Measure("share of rollout", "rollout", " (rollout)"),
    "norm": VALUE_WEIGHTED,
    "norm_residual": Measure("share of the row's norms", "norms of what attention and residual carry", " (norms)"),
    "gradient": Measure(
        "share of the row's positive p · ∂metric/∂p", "gradient-weighted attention", " (gradient-weighted)"
    ),
}
_READING: Final = {
    "rollout": "Each row shows how much of the token comes from each input token. Rows sum to 1.",
    "norm": "Each cell is the norm of what all heads together write from the key to the query.",
    "norm_residual": "Each cell is the norm of what comes from the key; the diagonal includes the token's own stream.",
    "gradient": "Each cell is the positive part of p · ∂metric/∂p, averaged over heads: to first order, the metric's "
    "rise per relative rise of this attention.",
}
