"""Scores kv heads for caches that keep few keys of some heads (docs/formulas.md#scores-of-kv-heads)."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, option, whole_number
from ...basics.files import making, path_of, writing
from ...basics.public import public
from ...batch import Batch
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import percent, signed
from ...errors import InputError, OutputError
from ...interventions import Head, Intervention
from ...maths.intervals import TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import OfLayers
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.sentences import interval_of, no_interval
from ...results.table import Table, require_no_head
from ...runs.ablations import checked_seed, reread
from ...runs.engine import Change
from ...runs.haystacks import Haystacks
from ...runs.journal import owning_journal
from ...runs.options import RunOptions
from ...runs.reducer import State
from ...runs.retrieval import LEAST_SHARE, NeedleRows
from ...runs.stream import stream
from ...runs.sweep import Sweeps
from .sums import PARTS, KeyParts

KEPT: Final = 0.95  # the share of the needles that must be left for the lead to name a number of streaming heads

_LABELS: Final = {"needles": "share of the needles' tokens that the model produces", "loss": "change of the loss, nats"}


@dataclass(frozen=True, repr=False)
class KVScores(Table, OfLayers):
    """What kv heads need of their cache, and what it costs if some see the first and the last keys alone ("stream").

    Tensors are `[layer kv_head]`. The heads stream in `order`; `curve` has the loss and the needles that the model
    finds as more and more of them do, beside random sets of the same shape. Intervals are over texts; those of
    `retrieval` and `repeats` over needles.
    """

    _TITLE = "What kv heads of {model} need of their cache"
    _SUBTRACT = "compare their `order`"
    _MAIN = "retrieval"
    _AXES: ClassVar = {"text": "tokens", "measured": "layers", "step": "counts"}
    FIGURES = tuple(_LABELS)
    retrieval = Statistic(
        meaning="The share of the needles' tokens that the model produces while the head attends most to them.",
        label="needles' tokens retrieved", unit="share", printed=True,
    )  # fmt: skip
    repeats = Statistic(
        meaning="The attention to the needle's token that comes next, where the needle is repeated.",
        label="attention to the needle's next token", unit="share", printed=True,
    )  # fmt: skip
    between = Statistic(
        meaning="The attention to keys between the first and the last, in rows that have such keys.",
        label="attention between", unit="share", printed=True,
    )  # fmt: skip
    sink = Statistic(meaning="The attention to the first keys.", unit="share", printed=True)
    recency = Statistic(meaning="The attention to the last keys.", unit="share", printed=True)
    cost = Statistic(
        meaning="The change of the loss if this kv head alone streams.", label="change of the loss", unit="nats",
        printed=True, tested=True, bounds=UNBOUNDED,
    )  # fmt: skip

    first: int
    last: int
    context: int
    """The length in tokens of the texts with needles."""
    layers: tuple[int, ...]
    n_layers: int
    counts: tuple[int, ...]
    """The number of streaming kv heads at each step of the curve."""
    retrieved: Float[Tensor, "measured head needle"]
    """The share of each needle's tokens that each query head retrieves."""
    repeated: Float[Tensor, "measured head needle"]
    parts: Float[Tensor, "text part=3 measured head"]
    """The attention of each query head to the first keys, the last keys and those between, summed over `rows` rows."""
    rows: Float[Tensor, " text"]
    before: Float[Tensor, " text"]
    """The loss with the whole cache."""
    alone: Float[Tensor, "measured kv_head text"]
    """The loss if one kv head streams."""
    after: Float[Tensor, "draw step text"]
    """The loss if several stream: first those with the lowest scores, then random sets of the same shape."""
    produced: Float[Tensor, " needle"]
    """The share of each needle's tokens that the model produces with the whole cache."""
    produced_after: Float[Tensor, "draw step needle"]
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    def _by_text(self, name: str) -> TextMeans:
        if name == "cost":
            return TextMeans.of_values(self.alone - self.before)
        means = TextMeans.of_values(self.retrieved if name == "retrieval" else self.repeated)
        if name in PARTS:
            means = TextMeans.of_ratio(self.parts[:, PARTS.index(name)].permute(1, 2, 0), self.rows)
        by_kv_head = means.mean.reshape(len(self.layers), -1, self._group)
        highest = by_kv_head.argmax(dim=-1) + torch.arange(by_kv_head.shape[1]) * self._group
        layers = torch.arange(len(highest))[:, None]
        return TextMeans(means.above[layers, highest], means.below[layers, highest])

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        return every if name in ("retrieval", "repeats") else super()._distinct_means(name, every)

    @property
    def _places(self) -> Places:
        heads = Places.of_heads(self.layers, self.alone.shape[1], self.n_layers)
        columns = {"layer": heads.columns["layer"], "kv_head": heads.columns["head"]}
        return replace(heads, columns=columns, things="kv heads")

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    @cached_property
    def keep(self) -> Float[Tensor, "layer kv_head"]:
        """How much a kv head needs the whole cache, from 0 to 1: its retrieval if that is at least 0.1; below, the rank
        of its cost among the heads that retrieve less, from 0 to 0.1.
        """
        scores, cost = self.retrieval.flatten().clone(), self.cost.flatten()
        others = (scores < LEAST_SHARE).nonzero()[:, 0]
        ranks = torch.arange(len(others)).to(scores) / max(1, len(others))
        scores[others[cost[others].argsort(stable=True)]] = LEAST_SHARE * ranks
        return scores.view_as(self.retrieval)

    @property
    def order(self) -> tuple[Head, ...]:
        """The kv heads, (layer, kv head), in the order in which they stream: from the lowest `keep` to the highest."""
        heads = product(self.layers, range(self.alone.shape[1]))
        return tuple(sorted(heads, key=lambda head: float(self.keep[head])))

    def streaming(self, share: float = 0.5) -> list[Head]:
        """The query heads of the kv heads with the lowest `keep`, for `am.Intervention.stream_only`.

        Args:
            share: the share of kv heads, from 0 to 1.
        """
        if not 0 <= finite_number("share", share) <= 1:
            raise InputError(f"`share` must be from 0 to 1; got {share:g}.")
        return _query_heads(self.order[: round(share * len(self.order))], self._group)

    @property
    def curve(self) -> pd.DataFrame:
        """One row per step: the number and the share of streaming kv heads; `loss`, the change of the loss in nats, and
        `needles`, the share of the needles' tokens that the model produces, with intervals and, of the random sets, the
        mean, the smallest and the largest.
        """
        frame = pd.DataFrame({"streaming": self.counts, "share": [count / len(self.order) for count in self.counts]})
        copies = self.provenance.copies
        for name, values, of in (("needles", self.produced_after, ()), ("loss", self.after - self.before, copies)):
            means, drawn = TextMeans.of_values(values[0], of), pd.DataFrame(values[1:].mean(dim=-1).numpy())
            low, high = (end.clamp(0, 1) if name == "needles" else end for end in means.interval())
            ends: dict[str, Any] = {"": means.mean.numpy(), "_low": low.numpy(), "_high": high.numpy()}
            ends |= {"_random": drawn.mean(), "_random_least": drawn.min(), "_random_most": drawn.max()}
            frame = frame.assign(**{f"{name}{end}": numbers for end, numbers in ends.items()})
        return frame

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws "needles" (the default) or "loss" by the number of streaming kv heads, or a statistic as a map of
        layers × kv heads; returned, not shown.
        """
        name = "needles" if figure is None else option("figure", figure, (*self.FIGURES, *self.quantities))
        if name not in self.FIGURES:
            return self._map(name, layer, head, columns="kv head")
        require_no_head(layer, head)
        curve = self.curve.filter(regex=f"^{name}").to_numpy().T  # value, low, high; mean, smallest, largest
        values: list[Any] = [("lowest scores first", *curve[:3]), ("random heads, and their range", *curve[3:])]
        rows = [f"{count} of {len(self.order)} kv heads" for count in self.counts]
        return interval_rows(rows, values, label=_LABELS[name])

    def _sections(self) -> "Sequence[Section]":
        reading = (
            f"So many kv heads see the first {self.first} and the last {self.last} keys alone: those with the lowest "
            "scores, or random ones, as many in the same layers."
        )
        return [Section("As more kv heads stream", reading, {name: self.plot(name) for name in self.FIGURES})]

    @property
    def lead(self) -> str:
        frame, whole = self.curve, float(self.produced.mean())
        # A model that finds no needles loses none, so half of its heads are as good a choice as any.
        steps = frame[frame.needles >= KEPT * whole] if whole >= LEAST_SHARE else frame[frame.share <= 0.5]
        row = steps.iloc[-1] if len(steps) else frame.iloc[0]
        ends = interval_of([float(row.loss_low), float(row.loss_high)], "+.2g")
        random = "" if math.isnan(row.needles_random) else f", {percent(row.needles_random, 0)} with random heads"
        return (
            f"If {int(row.streaming)} of {len(self.order)} kv heads see the first {self.first} and the last "
            f"{self.last} keys alone, the loss changes by {signed(row.loss, '.2g')} nats{ends} on {self._texts}, and "
            f"the model produces {percent(row.needles, 0)} of the needles' tokens ({percent(whole, 0)} with the whole "
            f"cache{random}); heads chosen on the same texts and needles{no_interval(self._n_distinct)}."
        )

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {"keep": self.keep}

    @property
    def _group(self) -> int:
        return self.retrieved.shape[1] // self.alone.shape[1]

    def write(self, folder: str | Path) -> Path:
        """Writes a folder with the page, `index.html`, and the files that tools for caches load.

        `full_attention_heads.tsv` (the matrix `keep`) and `config.json` are those of DuoAttention and kvpress;
        `head_scores.json`, the retrieval of each query head on each needle, is that of Retrieval_Head and SparseMM.

        Args:
            folder: the folder; other files in it stay.

        Returns:
            The path of the page.

        Raises:
            OutputError: the folder is not writable.

        Source: Xiao et al. 2025, Wu et al. 2024.
        """
        place = path_of(folder, OutputError)
        rows = ["\t".join(f"{score:.6f}" for score in row) for row in self.keep.nan_to_num(1.0).tolist()]
        of_heads = zip(product(self.layers, range(self.retrieved.shape[1])), self.retrieved.flatten(0, 1), strict=True)
        texts = {
            "index.html": self.to_html(),
            "full_attention_heads.tsv": "\n".join(rows),
            "config.json": json.dumps({"sink_size": self.first, "recent_size": self.last}),
            # Retrieval_Head reads one line, and SparseMM relies on the order of the heads.
            "head_scores.json": json.dumps({f"{layer}-{head}": of.tolist() for (layer, head), of in of_heads}),
        }
        with making(place), ExitStack() as drafts:  # no file is replaced before all are written
            for name, text in texts.items():
                drafts.enter_context(writing(place / name)).write_text(f"{text}\n", encoding="utf-8")
        return place / "index.html"


@public
@owning_journal
def kv_scores(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    first: int = 4,
    last: int = 256,
    steps: int = 8,
    random: int = 5,
    seed: int = 0,
    context: int | None = None,
    memory: float = 1.0,
    **options: Unpack[RunOptions],
) -> KVScores:
    """Scores kv heads by what they need of their cache: whether they retrieve, or can see few keys, and at which cost.

    between = Σ p_ij over the keys j ≥ first that lie `last` or more before the row i; cost = the loss if the head sees
    no such keys, minus the loss.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> scores = am.kv_scores(am.load(), documents(6), first=2, last=8, context=64, steps=2, random=2)
    >>> scores.retrieval.shape, len(scores.streaming(0.5))
    (torch.Size([4, 8]), 16)

    Query heads that share a kv head share its cache, in which an entry stays if any of them needs it: a statistic is
    that of the query head with the largest, and for `cost` all of them stream. The heads then stream together, those
    with the lowest scores first (`curve`), and random sets with as many heads in the same layers. The order is chosen
    on these texts and needles, so that a curve on others may be somewhat worse.

    Args:
        model: the model, a decoder.
        inputs: texts, or token ids, some longer than `first` + `last` tokens; an iterator is read once and kept in
            memory.
        first: the number of keys kept at the beginning of a text.
        last: the number of keys kept up to the row's own, which counts.
        steps: the number of steps of the curve, at equal shares of streaming heads.
        random: the number of random sets at each step; 0 for none.
        seed: draws the needles and the random sets.
        context: the length in tokens of 24 texts with needles, as in `am.head_types`; by default four times
            `first` + `last`, as far as the model reads.
        memory: how many GB the sweep may use on top of the model.
        options: bos, journal, engine and progress, as in `am.ablate_heads`. The journal holds `cost`.

    Returns:
        Scores by kv head with intervals over texts, and the curve; `write` makes the files of other tools.

    Raises:
        InputError: for a model that is not a decoder alone, for texts that are all too short, and for bad numbers.
        JournalError: if the journal belongs to another run.

    Source: Xiao et al. 2025 (streaming and retrieval heads), Wu et al. 2024 (retrieval).
    """
    require_model(model)
    first, last = whole_number("first", first), whole_number("last", last, least=1)
    steps, random = whole_number("steps", steps, least=1), whole_number("random", random)
    inputs, seed, stack, bos = reread(inputs), checked_seed(seed), model.output_stack, options.get("bos")
    if context is None:
        context = max(4 * (first + last), 64)
        context = min(context, model.architecture.position_limit or context)
    haystacks, group = Haystacks.of(model, whole_number("context", context), seed), stack.n_heads // stack.n_kv_heads
    parts: State
    (parts,) = stream(model, inputs, [KeyParts(first, last)], bos=bos, keep_rows=False)
    if not bool(parts["rows"].any()):
        raise InputError(
            f"no text has more than {first + last} tokens, so no head would lose a key; give longer texts, or a "
            "smaller `first` or `last`."
        )
    rows: State
    (rows,) = stream(model, iter(haystacks), [NeedleRows(haystacks.rows, haystacks.keys)])
    produced = haystacks.produced(model)
    retrieved = ((rows["highest"] == haystacks.keys) * produced).double().mean(dim=-1)

    def streams(heads: Sequence[Head]) -> Change:
        return (Intervention.stream_only(_query_heads(heads, group), first=first, last=last, stack=stack.label),)

    def share_produced(logits: Tensor, batch: Batch) -> Tensor:
        at = slice(haystacks.rows.start, haystacks.rows.stop)
        return (logits[:, at].argmax(dim=-1) == batch.ids[:, haystacks.rows.start + 1 :]).double().mean(dim=-1)

    noted = {"first": first, "last": last, "context": context, "steps": steps, "random": random, "seed": seed}
    how: dict[str, Any] = {"progress": options.get("progress", False), "engine": options.get("engine", "local")}
    sweeps = Sweeps(model, inputs, noted=noted, bos=bos, memory=memory)
    of_needles = Sweeps(model, iter(haystacks), share_produced, memory=memory)
    heads = [(layer, head) for layer in stack.layers for head in range(stack.n_kv_heads)]
    swept = sweeps.sweep([streams([head]) for head in heads], journal=options.get("journal"), **how)
    scores = KVScores(
        first, last, context, stack.layers, len(stack.places), (), retrieved,
        rows["on_target"].double().mean(dim=-1), parts["sums"], parts["rows"], swept.before,
        swept.after.reshape(len(stack.layers), stack.n_kv_heads, -1), swept.after.new_zeros(1, 0, len(swept.before)),
        produced.mean(dim=-1), produced.new_zeros(1, 0, len(produced)), swept.tokens, swept.provenance,
    )  # fmt: skip
    order = scores.order
    counts = tuple(dict.fromkeys(math.ceil(len(order) * step / steps) for step in range(1, steps + 1)))
    sets: list[Sequence[Head]] = [order[:count] for count in counts]
    for number in range(random):
        sets += [_random_set(order[:count], stack.layers, stack.n_kv_heads, seed + number) for count in counts]
    after, produced_after = (
        of_texts.sweep(list(map(streams, sets)), **how).after.reshape(1 + random, len(counts), -1)
        for of_texts in (sweeps, of_needles)
    )
    return replace(scores, counts=counts, after=after, produced_after=produced_after)


def _query_heads(heads: Iterable[Head], group: int) -> list[Head]:
    """All query heads that share these kv heads."""
    return sorted((layer, head * group + member) for layer, head in heads for member in range(group))


def _random_set(heads: Sequence[Head], layers: Sequence[int], n_heads: int, seed: int) -> list[Head]:
    """As many heads in the same layers; if there are few such sets, with the numbers of the layers permuted."""
    held, generator = Counter(layer for layer, _ in heads), Random(seed)
    counts = [held[layer] for layer in layers]
    if math.prod(math.comb(n_heads, count) for count in counts) < 20:  # as in am.confirm_heads
        generator.shuffle(counts)
    of_layers = zip(layers, counts, strict=True)
    return [(layer, head) for layer, count in of_layers for head in generator.sample(range(n_heads), count)]
