"""Measures the model's output and loss when one segment of a text can no longer attend to another."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, option, whole_number
from ...basics.public import public
from ...draw.section import Section
from ...draw.segments import segment_labels, segment_map
from ...draw.text import quoted
from ...errors import InputError
from ...interventions import Heads, Intervention, checked_heads
from ...model.inputs.encoder import Inputs
from ...model.parts.hashes import batch_hash
from ...model.run.hooked import HookedModel, require_model
from ...model.run.loss import GROUPS, known_mask_id
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...results.table import require_no_head
from ...runs.engine import Change
from ...runs.journal import kept
from ...runs.metrics import Metric
from ...runs.options import RunOptions
from ...runs.sweep import run_sweep
from .segmentation import Segmented, Segments, real_texts

STRONGEST: Final = 20  # the number of key segments that are measured if all pairs would take too long
METRICS: Final = ("kl", "loss")
_LABELS: Final = {"kl": "KL, nats", "loss": "loss, nats"}


@public
def segment_effects(
    model: HookedModel,
    inputs: Inputs,
    segments: Segments = "sentence",
    *,
    heads: Heads = "all",
    budget: float = 600.0,
    memory: float = 1.0,
    **options: Unpack[RunOptions],
) -> "SegmentEffects":
    """Measures, for every pair of segments, how cutting one segment off from another affects the later text.

    For each pair of a segment t and a later segment s, attention from the rows of s to the keys of t is removed inside
    the softmax of the heads (`am.Intervention.cut`). The effect is in nats per token: the KL divergence from the clean
    output and, if the model predicts tokens, the change of loss. In a causal model the mean is over the tokens from the
    beginning of s, because no others change; in other models it is over the whole text. A classifier has one KL per
    text. Each segment is also cut off from all later segments at once. Every row still attends to its own segment, so
    no row is left without a key.

    >>> import attnmech as am
    >>> model = am.load()
    >>> effects = am.segment_effects(model, "Anna lost her anchor. Tom sang. Anna was sad.")
    >>> effects.kl.shape, bool(effects.kl[2, 0] > 0)
    (torch.Size([3, 3]), True)

    Args:
        model: the model.
        inputs: one text.
        segments: as in `am.segment_attention`.
        heads: the heads whose attention is cut; by default all heads of all layers.
        budget: the time that measuring all pairs may take, in seconds; an estimate is printed first. If the estimate is
            longer, only pairs of 20 key segments are measured: those with the largest KL when cut off from all later
            segments.
        memory: how many GB a step may use on top of the model.
        options: `bos`, `progress`, `journal` and `engine`, as in `am.ablate_heads`. The journal consists of several
            files whose names begin with this path.

    Returns:
        Effects by pair and by segment; NaN where they were not measured.

    Raises:
        InputError: for several texts, for fewer than two segments, for spans that do not cover the text, and for
            models with an encoder and a decoder or without logits over tokens.

    """
    require_model(model)
    budget = finite_number("budget", budget, above=0.0)
    if len(model.stacks) > 1:
        raise InputError("`segment_effects` needs a model with one stack; this model has an encoder and a decoder.")
    Metric.of(model, "kl", None, None, 1)  # refuses a model without logits before any pass
    bos = options.get("bos")
    batch = model.encode(inputs, bos=bos)
    if len(batch.ids) != 1:
        raise InputError(f"`segment_effects` takes one text; got {len(batch.ids)}.")
    chosen = checked_heads(heads)
    starts = Segmented.of(batch, segments).starts[0]
    count = len(starts) - 1
    if count < 2:
        raise InputError("a cut needs at least two segments; this text has one. Pass other `segments`.")
    spans = list(pairwise(starts))
    work = _Cutting(model, batch, spans, chosen, {"memory": memory, **options})
    pairs = [
        (query, key)
        for key in range(count)
        for query in range(count)
        if query > key or not (model.causal or query == key)
    ]
    estimate = work.estimate(len(pairs) + count)
    print(f"{len(pairs)} pairs of segments: about {estimate:.0f} s", file=sys.stderr)
    with ExitStack() as owned:
        for journal in (work.journal(what, metric) for what in ("later", "pairs") for metric in METRICS):
            owned.enter_context(kept(journal))
        later = work.measured("later", [(None, key) for key in range(count - 1 if model.causal else count)])
        if estimate > budget:
            chosen_keys = {key for _, key in sorted(later["kl"], key=lambda place: -later["kl"][place])[:STRONGEST]}
            pairs = [pair for pair in pairs if pair[1] in chosen_keys]
            print(
                f"more than {budget:.0f} s, so only the pairs of {len(chosen_keys)} segments are measured",
                file=sys.stderr,
            )
        by_metric = work.measured("pairs", pairs)
    fields: dict[str, Any] = {"loss": None, "loss_from_later": None}
    for metric in by_metric:
        whole = torch.full((count, count), torch.nan, dtype=torch.float64)
        for place, value in by_metric[metric].items():
            whole[place] = value
        alone = [later[metric].get((None, key), math.nan) for key in range(count)]
        fields |= {metric: whole, f"{metric}_from_later": torch.tensor(alone, dtype=torch.float64)}
    options_used = {
        "segments": segments if isinstance(segments, str) else "span", "heads": str(chosen), "bos": batch.bos,
    }  # fmt: skip
    options_used["per"] = "" if model.predicts == "output" else "later token" if model.causal else "token"
    return SegmentEffects(
        **fields,
        causal=model.causal,
        starts=starts,
        tokens=real_texts(batch)[0],
        provenance=model.provenance(batch_hash(batch), batch.tokens, options_used),
    )


_Pair = tuple[int | None, int]
"""A cut: the query segment, or None for all later segments (all other segments in a bidirectional model), and the key
segment.
"""


@dataclass
class _Cutting:
    """Measures cuts between the segments of one text."""

    model: HookedModel
    batch: Any
    spans: Sequence[tuple[int, int]]
    heads: Any
    options: dict[str, Any]

    def estimate(self, changes: int) -> float:
        """Estimates the seconds that a number of changes take: one clean pass for each change and metric."""
        self.model.forward(self.batch, captures=[("logits", None)])
        begin = time.perf_counter()
        self.model.forward(self.batch, captures=[("logits", None)])
        passes = {"next token": 2, "masked token": 1 + GROUPS}.get(self.model.predicts, 1)
        return (time.perf_counter() - begin) * changes * passes

    def journal(self, what: str, metric: str) -> str | None:
        """The journal of one of the sweeps."""
        path = self.options.get("journal")
        return None if path is None else f"{path}.{what}.{metric}"

    def measured(self, what: str, pairs: Sequence[Any]) -> dict[str, dict[_Pair, float]]:
        """The effect of each cut, per token that the cut can change."""
        changes = [self._change(query, key) for query, key in pairs]
        model, by_metric = self.model, {}
        masks = model.predicts == "masked token" and known_mask_id(model.tokenizer, model.config) is not None
        for metric in METRICS if masks or model.predicts == "next token" else METRICS[:1]:
            options = {**self.options, "journal": self.journal(what, metric)}
            swept = run_sweep(self.model, self.batch, changes, metric, **options)
            effects = (swept.after - swept.before)[:, 0].tolist()
            by_metric[metric] = {
                pair: effect * self._scale(pair, metric) for pair, effect in zip(pairs, effects, strict=True)
            }
        return by_metric

    def _change(self, query: int | None, key: int) -> Change:
        length, span = self.spans[-1][1], self.spans[key]
        if query is not None:
            rows = [self.spans[query]]
        else:
            rows = [(span[1], length)] if self.model.causal else [(0, span[0]), (span[1], length)]
        return tuple(Intervention.cut(row_span, span, self.heads) for row_span in rows if row_span[1] > row_span[0])

    def _scale(self, pair: _Pair, metric: str) -> float:
        """The factor from the mean over the text to the mean from the first cut row on; earlier rows do not change."""
        if not self.model.causal or self.model.predicts == "output":
            return 1.0
        query, key = pair
        start = self.spans[key][1] if query is None else self.spans[query][0]
        rows = self.spans[-1][1] - (1 if metric == "loss" else 0)
        return rows / (rows - start) if rows > start else float("nan")


@dataclass(frozen=True, repr=False)
class SegmentEffects(PagedResult):
    """The effects of cutting the rows of one segment of a text off another segment, in nats per token.

    In a causal model, means are over the tokens from the query segment's first token; in others over the whole text.
    """

    _TITLE = "Effect of cutting attention between segments in {model}"
    _SUBTRACT = "subtract what you compare: one.kl - other.kl"
    FIGURES = METRICS

    kl: Float[Tensor, "query_segment key_segment"]
    """Mean KL divergence from the clean output, in nats; NaN where it was not measured."""
    kl_from_later: Float[Tensor, " segment"]
    """Mean KL divergence when all later segments (all other segments in a bidirectional model) are cut off from this
    one.
    """
    loss: Float[Tensor, "query_segment key_segment"] | None
    """The change of the mean cross-entropy, in nats; NaN where no token follows, None for a model without a loss."""
    loss_from_later: Float[Tensor, " segment"] | None
    causal: bool
    starts: tuple[int, ...]
    """Each segment's start, counted from the text's first token, followed by the text's length."""
    tokens: tuple[str, ...]
    provenance: Provenance

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        count = len(self.starts) - 1
        return {"query_segment": count, "key_segment": count, "segment": count}

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments as strings."""
        return tuple("".join(self.tokens[a:b]) for a, b in pairwise(self.starts))

    def to_frame(self) -> pd.DataFrame:
        """One row per pair measured, the largest KL first, with both segments as text."""
        query, key = (~self.kl.isnan()).nonzero().T
        names = self.segments
        columns: dict[str, Any] = {"query_segment": query, "key_segment": key, "kl": self.kl[query, key]}
        if self.loss is not None:
            columns["loss"] = self.loss[query, key]
        columns = {name: values.tolist() for name, values in columns.items()}
        columns |= {side: [names[place] for place in columns[f"{side}_segment"]] for side in ("query", "key")}
        return pd.DataFrame(columns).sort_values("kl", ascending=False, kind="stable", ignore_index=True)

    def strongest(self, count: int = 10, by: str | None = None) -> pd.DataFrame:
        """The rows of `to_frame` with the largest "kl", or "loss"."""
        name = "kl" if by is None else option("by", by, METRICS)
        ordered = self.to_frame().sort_values(name, ascending=False, kind="stable", ignore_index=True)
        return ordered.head(whole_number("count", count, least=1))

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws query segments × key segments, coloured by the effect of the cut on "kl" (the default) or "loss"; the
        figure is returned, not shown.
        """
        require_no_head(layer, head)
        metric = "kl" if figure is None else option("figure", figure, self.FIGURES)
        values = self.loss if metric == "loss" else self.kl
        if values is None:
            raise InputError('this model predicts neither the next token nor masked tokens; use "kl".')
        return segment_map(
            values.numpy(), segment_labels(self.segments), label=_LABELS[metric], title="attention cut",
            signs=metric == "loss",
        )  # fmt: skip

    @property
    def lead(self) -> str:
        frame = self.to_frame()
        if not len(frame):
            return "No pair of segments was measured."
        top = frame.iloc[0]
        known = self.loss is not None and not math.isnan(top["loss"])
        loss = f" and {top['loss']:+.3g} of loss".replace("-", "−") if known else ""
        return (
            f"Cutting attention from segment {top['query_segment']} to segment {top['key_segment']}, "
            f"{quoted(str(top['key']).strip()[:60])}, has the largest effect: {top['kl']:.3g} nats of "
            f"KL{loss}{self._per} (pairs of segments measured: {len(frame)})."
        )

    @property
    def _per(self) -> str:
        """The unit over which numbers are means, as the end of a phrase; empty for a classifier's output."""
        unit = self.provenance.options.get("per", "later token" if self.causal else "token")
        return f" per {unit}" if unit else ""

    def _sections(self) -> "Sequence[Section]":
        reading = (
            f"Each cell shows the effect{self._per}, in nats, of preventing the query segment from attending to the "
            "key segment. Empty cells were not measured. The first segment contains the text's first token, an "
            "attention sink in many models; cutting it removes that sink too."
        )
        names = METRICS if self.loss is not None else METRICS[:1]
        figures = {name: self.plot(name) for name in names}
        return [Section("Effect of each cut", reading, figures, "effects.plot()", name="effects")]
