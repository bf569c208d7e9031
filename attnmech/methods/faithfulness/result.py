"""Faithfulness: how much of a metric a circuit alone keeps, and how much is left without it.

Formulas: docs/formulas.md#faithfulness.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, flag, listed, option, shown
from ...basics.nouns import counted
from ...basics.public import public
from ...batch import every_bos
from ...draw.figure import Figure
from ...draw.intervals import error_bars
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Values
from ...maths.float64 import as_float64
from ...maths.intervals import LEVEL, TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.circuit import Circuit
from ...results.graph import Graph
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.sentences import in_words, interval_of, no_interval
from ...results.table import Table, require_no_head
from ...runs.ablations import reread
from ...runs.corpus import CorpusBatch, contents_of
from ...runs.edge_passes import patched_edges
from ...runs.metrics import SAME_METRIC, MetricLike
from ...runs.options import MeasuringOptions
from ...runs.prompt_pairs import PromptPairs
from ...runs.residual_graph import OF_SENDERS, graph_of
from ...runs.sweep import batches_of, judge_of, tokens_of

OUTSIDE: Final = {
    "corrupted": "what senders write in the corrupted run",
    "mean": "the mean over tokens of what senders write",
    "zero": "zeros",
}
"""What inputs read along edges outside a circuit."""


@dataclass(frozen=True, repr=False)
class Faithfulness(Table):
    """How much of a metric circuits keep when all other edges are patched, and how much is left without them.

    `faithfulness [circuit]` is (m(C) − m(∅)) / (m(N) − m(∅)): m(N) is the metric of the whole model, m(∅) with all
    edges patched, m(C) with all edges outside the circuit patched. `completeness` is the same with the circuit's own
    edges patched: 0 if nothing outside does the same work. Intervals are over pairs of prompts.
    """

    _SUBTRACT: ClassVar[str] = "subtract their `faithfulness`"
    _is_about_heads: ClassVar[bool] = False
    _MAIN = "faithfulness"
    _SAMPLE = "pair"
    _AXES: ClassVar = {"pair": "tokens", "circuit": "sizes"}
    faithfulness = Statistic(
        meaning="The share of the metric that each circuit keeps.", bounds=UNBOUNDED, axes="circuit"
    )
    completeness = Statistic(
        meaning="The share of the metric that is left without each circuit.", bounds=UNBOUNDED, axes="circuit"
    )

    metric: str
    outside: str
    """ "corrupted", "mean" or "zero"."""
    sizes: tuple[int, ...]
    """The number of edges in each circuit."""
    n_edges: int
    """The number of edges in the model."""
    full: Float[Tensor, " pair"]
    """The metric of the whole model."""
    empty: Float[Tensor, " pair"]
    """The metric with all edges patched."""
    inside: Float[Tensor, "circuit pair"]
    """The metric with only the circuit's edges left."""
    without: Float[Tensor, "circuit pair"]
    """The metric with the circuit's edges patched."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens of the clean prompts."""
    provenance: Provenance

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of all edges in each circuit."""
        return tuple(size / self.n_edges for size in self.sizes)

    def _by_text(self, name: str) -> TextMeans:
        return self._kept(self.inside if name == "faithfulness" else self.without)

    @property
    def _places(self) -> Places:
        rows = {"size": self.sizes, "share": self.shares}
        return Places(rows, (slice(None),), lambda place: f"{self.sizes[place[0]]} edges", things="circuits")

    @property
    def _n_texts(self) -> int:
        return len(self.full)

    @property
    def cpr(self) -> float:
        """The area under faithfulness over the share of edges (trapezoid rule; MIB's CPR).

        NaN without a circuit of all edges, up to which the area goes.
        """
        return self._areas["cpr"].mean.item()

    @property
    def cmd(self) -> float:
        """The area between faithfulness and 1 over the share of edges (MIB's CMD); NaN where `cpr` is."""
        return self._areas["cmd"].mean.item()

    def area_interval(self, area: str, level: float = LEVEL) -> tuple[float, float]:
        """Low and high end of the t interval of "cpr" or "cmd" over pairs; NaN for fewer than five.

        That of "cmd" takes as given which circuits keep more than the whole metric.
        """
        low, high = self._areas[option("area", area, ("cpr", "cmd"))].interval(level)
        return low.item(), high.item()

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Faithfulness and completeness over the share of edges, with intervals."""
        require_no_head(layer, head)
        return faithfulness_curve(self.to_frame())

    @property
    def lead(self) -> str:
        # The smallest circuit that keeps at least 0.9 of the metric, else the one that keeps most.
        enough = [place for place, kept in enumerate(self.faithfulness.tolist()) if kept >= 0.9]
        place = min(enough, key=lambda place: self.sizes[place]) if enough else int(self.faithfulness.argmax())
        means, several = self["faithfulness"].means, len(self.sizes)
        # The circuit of the sentence was chosen among several.
        ends = tuple(float(end[place]) for end in (means.simultaneous() if several > 1 else means.interval()))
        kept = (
            f"{self.sizes[place]} of {counted(self.n_edges, noun='edge')} keep {float(self.faithfulness[place]):.2f} "
            f"of the metric{interval_of(ends, '.2f', several, 'circuits')}, and {float(self.completeness[place]):.2f} "
            "is left without them"
        )
        few = no_interval(self._n_distinct, self._SAMPLE)
        areas = f"; CPR {self.cpr:.2f}, CMD {self.cmd:.2f}" if self._has_areas else ""
        return with_minus_signs(f"On {self._texts}, {kept}{areas}{few}.")

    @property
    def _has_areas(self) -> bool:
        return len(self.sizes) > 1 and max(self.sizes) == self.n_edges

    @property
    def _title(self) -> str:
        return f"Faithfulness of {'a circuit' if len(self.sizes) == 1 else 'circuits'} on {in_words(self.metric)}"

    def _sections(self) -> "Sequence[Section]":
        reading = (
            f"Along edges outside the circuit, inputs read {OUTSIDE[self.outside]}. 1 is the whole model, 0 the model "
            "with all edges patched. Squares show what is left if only the circuit's own edges are patched."
        )
        return [Section("Faithfulness", reading, {"faithfulness": self.plot()}, "faithfulness.plot()")]

    def _kept(self, measured: Float[Tensor, "*circuit pair"]) -> TextMeans:
        return TextMeans.of_ratio(measured - self.empty, self.full - self.empty)

    @cached_property
    def _areas(self) -> Mapping[str, TextMeans]:
        order = sorted(range(len(self.sizes)), key=lambda place: self.sizes[place])
        if not self._has_areas:
            return dict.fromkeys(("cpr", "cmd"), TextMeans.of_values(torch.full((1, len(self.full)), torch.nan)))
        weights = trapezoid([self.shares[place] for place in order])[:, None]
        gap, kept = self.full - self.empty, (self.inside - self.empty)[order]
        below_one = (1 - self.faithfulness[order]).sign()[:, None]
        areas = {"cpr": weights * kept, "cmd": weights * below_one * (gap - kept)}
        return {
            name: TextMeans.of_ratio(values.sum(dim=0)[None], gap, self.provenance.copies)
            for name, values in areas.items()
        }


@public
def faithfulness(
    model: HookedModel,
    circuits: Circuit | Iterable[Circuit],
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs] | None = None,
    *,
    outside: str = "corrupted",
    metric: MetricLike = "logit_difference",
    **options: Unpack[MeasuringOptions],
) -> Faithfulness:
    """Measures how much of a metric circuits keep when every edge outside them is patched.

    >>> import attnmech as am
    >>> model, prompts = am.load(), (["The keys to the chest"], ["The key to the chest"])
    >>> answers = {"answers": [" are"], "against": [" is"]}
    >>> edges = am.attribute(model, *prompts, nodes="heads+mlps", edges=True, **answers)
    >>> curve = am.faithfulness(model, edges.circuits(), *prompts, **answers)
    >>> curve.sizes[-1], round(float(curve.faithfulness[-1]), 4)
    (1519, 1.0)

    The model reads the clean prompts. Each input (q, k and v of a head, an MLP, the logits) reads the sum of what all
    nodes before it write; along edges outside the circuit, it reads what the sender writes in the corrupted run
    instead. Everything later is computed from these inputs, so this is no estimate.

    Args:
        model: a model with one stack, in which nodes add what they write to one stream.
        circuits: a circuit, or several, such as `attribution.circuits()`; other prompts may have chosen them.
        clean: prompts, or token ids.
        corrupted: the same number of prompts, each with the same number of tokens as its clean partner; for
            outside="mean", the prompts of the mean, by default `clean`.
        outside: what senders write along edges outside: "corrupted", as in the corrupted run; "mean", their mean over
            all tokens; or "zero". The embedding is a sender.
        metric: as in `am.patch`, measured on the clean prompts.
        options: answers, against (one token per pair), bos, memory and progress, as in `am.patch`.

    Returns:
        For each circuit, faithfulness and completeness with intervals over pairs; for `attribution.circuits()`, MIB's
        areas CPR and CMD.

    Raises:
        InputError: for circuits with edges that the model lacks, prompts that do not pair up, a metric that patching
            all edges leaves the same, models whose nodes do not add to one stream, and within hooks; and in the cases
            of `am.attribute`.

    Source: Wang et al. 2022 (faithfulness, completeness); Marks et al. 2024 (completeness of the complement); Mueller
    et al. 2025 (MIB: CPR and CMD).
    """
    require_model(model)
    option("outside", outside, OUTSIDE)
    graph = graph_of(model)
    chosen = [circuits] if isinstance(circuits, Circuit) else listed("circuits", circuits, "a circuit or several")
    if not chosen or not all(isinstance(circuit, Circuit) for circuit in chosen):
        raise InputError(f"`circuits` must be a circuit or several, as attribution.circuit(40); got {shown(circuits)}.")
    masks = [circuit.mask(graph) for circuit in chosen]
    bos, progress = options.get("bos"), flag("progress", options.get("progress", False))
    memory = finite_number("memory", options.get("memory", 1.0), above=0.0, below=1e9)
    clean = reread(clean)
    if outside == "corrupted":
        if corrupted is None:
            raise InputError(
                '`outside="corrupted"` needs corrupted prompts; pass them, or use outside="zero" or "mean".'
            )
        pairs = PromptPairs.of(model, clean, reread(corrupted), bos)
        other = pairs.values_at(model, _points(model, graph), corrupted=True)
        inputs, contents = pairs.prompts[0], pairs.contents
    else:
        inputs, contents = clean, None
        prompts = clean if corrupted is None else reread(corrupted)
        other = _means(model, graph, prompts, bos, times=float(outside == "mean"))
    at_once = max(1, int(memory * 1e9 / (4 * 4 * len(graph.senders) * model.d_model)))
    parts = batches_of(model, inputs, at_once, bos)
    judge = judge_of(model, parts, metric, options.get("answers"), options.get("against"))
    copies = judge.copies(contents_of(parts) if contents is None else contents)
    if judge.mask_id is not None:
        raise InputError('the loss of a masked language model is measured on masked copies; use "logit_difference".')
    measure = {"progress": progress, "memory": memory}
    ends = [torch.zeros_like(graph.exists), graph.exists]
    full, empty = patched_edges(model, graph, parts, other, judge, ends, measure)
    if abs(float(full.mean() - empty.mean())) <= SAME_METRIC * abs(float(full.mean())):
        raise InputError(
            f"patching all edges leaves {judge.name} at {float(full.mean()):.4g}, so there is nothing to keep; use "
            "prompts that differ in it."
        )
    patched = [graph.exists & ~mask for mask in masks] + masks
    inside, without = patched_edges(model, graph, parts, other, judge, patched, measure).chunk(2)
    tokens = tokens_of(parts, model.output_stack.label)
    noted = {"bos": every_bos(part.batch.bos for part in parts), "metric": judge.name, "outside": outside}
    return Faithfulness(
        judge.name, outside, tuple(int(mask.sum()) for mask in masks), int(graph.exists.sum()), full, empty, inside,
        without, tokens, model.provenance(parts[-1].digest, tokens, noted, copies),
    )  # fmt: skip


def _points(model: HookedModel, graph: Graph) -> dict[str, Sequence[int]]:
    layers = model.output_stack.layers
    return {**dict.fromkeys(OF_SENDERS if graph.mlps else OF_SENDERS[:1], layers), "resid_pre": layers[:1]}


def _means(
    model: HookedModel, graph: Graph, inputs: Any, bos: bool | None, *, times: float
) -> dict[str, dict[int, Values]]:
    """What each sender writes, on average over tokens, times a factor."""
    keys = [(point, layer) for point, layers in _points(model, graph).items() for layer in layers]
    sums: dict[tuple[str, int], Tensor] = {}
    tokens = 0
    part: CorpusBatch
    for part in batches_of(model, inputs, 2048, bos):
        real = part.batch.mask
        tokens += int(real.sum())
        for key, value in model.forward(part.batch, captures=keys).items():
            own = as_float64(value[real]).sum(dim=0)
            sums[key] = sums[key] + own if key in sums else own  # type: ignore[index]
    means: dict[str, dict[int, Values]] = {}
    for (point, layer), total in sums.items():
        means.setdefault(point, {})[layer] = Values({layer: (times * total / tokens)[None, None]})
    return means


def trapezoid(shares: Sequence[float]) -> Float[Tensor, " circuit"]:
    """The weights of the trapezoid rule: Σ w_k f_k approximates ∫ f from the smallest to the largest share.

    >>> trapezoid([0.0, 0.5, 1.0]).tolist()
    [0.25, 0.5, 0.25]
    """
    half = torch.tensor(shares, dtype=torch.float64).diff() / 2
    return torch.nn.functional.pad(half, (0, 1)) + torch.nn.functional.pad(half, (1, 0))


def faithfulness_curve(frame: pd.DataFrame) -> go.Figure:
    """Draws faithfulness and completeness in `Faithfulness.to_frame` over the share of edges, with intervals."""
    figure = Figure()
    kinds = {"faithfulness": ("only the circuit", "circle"), "completeness": ("everything but the circuit", "square")}
    for (name, (label, symbol)), colour in zip(kinds.items(), (SCORE_COLOURS[-1], NEUTRAL), strict=True):
        figure.add_scatter(
            x=100 * frame["share"],
            y=frame[name],
            error_y=error_bars(frame, name),
            mode="lines+markers",
            line={"color": colour, "dash": "solid" if name == "faithfulness" else "dot"},
            marker={"color": colour, "symbol": symbol, "size": 7},
            name=label,
            text=frame["size"],
            hovertemplate=f"{label}: %{{y:.3g}}<br>%{{text}} edges (%{{x:.3g}} %)<extra></extra>",
        )
    for level in (0, 1):
        figure.add_hline(y=level, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    figure.update_layout(template=FIGURE_STYLE, height=360)
    figure.update_xaxes(title="edges in the circuit (%)", type="log")
    figure.update_yaxes(title="share of the metric kept")
    return figure
