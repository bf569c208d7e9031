"""Ablates heads one after another, the least harmful first (docs/formulas.md#ablation)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import optional_flag, whole_number
from ...basics.files import path_of
from ...basics.messages import capitalised
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.figure import Figure
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, MARKS, NEUTRAL
from ...draw.text import signed
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...maths.intervals import TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.sentences import interval_of, no_interval, unit_of
from ...results.table import Table, require_no_head
from ...runs.ablations import Ablations, checked_seed, reread
from ...runs.journal import Entry, Journal, leave, owning_journal
from ...runs.metrics import HIGHER_IS_BETTER, Metric, MetricLike
from ...runs.options import SweepOptions
from ...runs.progress import steps as bar_of
from ...runs.sweep import Sweeps, Swept, identity_of_sweep


@dataclass(frozen=True, repr=False)
class PruningCurve(Table):
    """A metric as heads are ablated one after another; each step adds the head whose ablation hurts least.

    The curve is measured on the same texts that chose the heads, so other texts will give a somewhat worse curve. The
    baseline `random` ablates the same number of heads in random order. Intervals are over texts.
    """

    _TITLE = "Pruning heads: {result.method} ablation and {metric}"
    _SUBTRACT = "two curves ablate heads in different orders, so subtract the results of am.ablate_heads"

    _MAIN = "effect"
    _AXES: ClassVar = {"step": "order", "draw": "random_orders", "text": "tokens"}
    effect = Statistic(
        meaning="The change of the mean metric after each step.", tested=True, bounds=UNBOUNDED, axes="step"
    )

    metric: str
    method: str
    higher_is_better: bool
    order: tuple[Head, ...]
    """The heads in the order in which they were ablated."""
    asked: int
    """The number of heads requested."""
    before: Float[Tensor, " text"]
    """The metric of each text with all heads."""
    after: Float[Tensor, "step text"]
    """The metric with the first 1, 2, ... heads of `order` ablated."""
    random_orders: tuple[tuple[Head, ...], ...]
    """The random orders, drawn with the seed."""
    random: Float[Tensor, "draw step text"]
    """The metric with the first 1, 2, ... heads of each random order ablated; NaN where not measured."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    def _by_text(self, name: str) -> TextMeans:
        return TextMeans.of_values(self.after - self.before)

    @property
    def _places(self) -> Places:
        steps = len(self.order)
        layers, heads = ([head[place] for head in self.order] for place in (0, 1))
        rows = {"removed": range(1, steps + 1), "layer": layers, "head": heads}
        return Places(rows, (slice(None),), lambda place: f"{place[0] + 1} heads", things="steps")

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    @property
    def complete(self) -> bool:
        """Whether all steps and all random orders were measured; False if the run was interrupted."""
        return len(self.order) == self.asked and not bool(self.random.isnan().any())

    @property
    def _further(self) -> Mapping[str, Tensor]:
        """The metric after each step, and the mean, smallest and largest effect over the random orders."""
        drawn = (self.random - self.before).mean(dim=-1)
        drawn = drawn if len(drawn) else torch.full((1, len(self.order)), torch.nan)
        return {
            "after": self.after.mean(dim=-1),
            "random": drawn.mean(dim=0),
            "random_least": drawn.amin(dim=0),
            "random_most": drawn.amax(dim=0),
        }

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws the metric against the number of ablated heads, with its interval, and the random orders."""
        require_no_head(layer, head)
        curve = torch.cat((self.before[None], self.after))
        low, high = (end.numpy() for end in TextMeans.of_values(curve, self.provenance.copies).interval())
        start = self.before.mean().expand(len(self.random), 1)
        places = list(range(len(curve)))
        figure = Figure()
        for number, draw in enumerate(torch.cat((start, self.random.mean(dim=-1)), dim=1).numpy()):
            figure.add_scatter(
                x=places, y=draw, mode="lines", name="in random order", legendgroup="random", showlegend=number == 0,
                line={"color": NEUTRAL, "width": 1, "dash": "dot"},
                hovertemplate=f"%{{x}} heads removed, random order {number}<br>%{{y:.4g}}<extra></extra>",
            )  # fmt: skip
        if np.isfinite(low).any():
            figure.add_scatter(
                x=[*places, *reversed(places)], y=[*high, *low[::-1]], fill="toself", mode="lines", line={"width": 0},
                fillcolor="rgba(0,158,115,0.2)", name="95 % over texts", hoverinfo="skip",
            )  # fmt: skip
        look = MARKS["self"]
        figure.add_scatter(
            x=places, y=curve.mean(dim=-1).numpy(), mode="lines+markers", name="least harmful first",
            line={"color": look.colour, "width": 2}, marker={"symbol": look.symbol, "size": 6},
            text=["none", *(f"L{layer}H{head}" for layer, head in self.order)],
            hovertemplate="%{x} heads removed, last %{text}<br>%{y:.4g}<extra></extra>",
        )  # fmt: skip
        figure.update_layout(template=FIGURE_STYLE, height=360)
        figure.update_xaxes(title="heads removed")
        figure.update_yaxes(title=unit_of(self.metric))
        return figure

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each step ablates the head whose ablation hurts least on these texts. Dotted lines show heads ablated in "
            "random order."
        )
        return [Section("Pruning", reading, {"pruning": self.plot()}, "curve.plot()")]

    @property
    def lead(self) -> str:
        texts = self._texts
        frame = self.to_frame()
        middle = frame.iloc[(len(frame) + 1) // 2 - 1]
        ends = [float(end[int(middle.removed) - 1]) for end in self.simultaneous()]
        known = interval_of(ends, "+.3g", len(frame), "steps")
        against = "" if pd.isna(middle["random"]) else f", in random order {signed(middle['random'], '.3g')}"
        part = "" if self.complete else f"; stopped early, after {len(self.order)} of {self.asked} heads"
        return capitalised(
            f"{self.method} ablation of the {int(middle.removed)} least harmful of "
            f"{counted(len(self.order), noun='head')} on {texts}: "
            f"{signed(middle.effect, '.3g')} {unit_of(self.metric)}{known}{against}; heads chosen on the same "
            f"texts{no_interval(self._n_distinct)}{part}."
        )


@public
@owning_journal
def prune_heads(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    heads: Heads = "all",
    method: str = "zero",
    metric: MetricLike = "loss",
    steps: int | None = None,
    higher_is_better: bool | None = None,
    layers: Iterable[int] | None = None,
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    random: int = 5,
    seed: int = 0,
    **options: Unpack[SweepOptions],
) -> PruningCurve:
    """Measures how a metric changes as heads are ablated one after another, the least harmful first.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> curve = am.prune_heads(am.load(), documents(6), layers=[0], steps=3)
    >>> len(curve.order), curve.after.shape
    (3, torch.Size([3, 6]))

    Each step tries every remaining head together with those already ablated, and ablates the head with the best mean
    metric. N heads take N(N + 1)/2 measurements, and fewer with `steps`.

    Args:
        model: the model.
        inputs: texts, or token ids.
        heads: a list of (layer, head), or "all".
        method: "zero", "mean" or "resample", as in `am.ablate_heads`.
        metric: as in `am.ablate_heads`.
        steps: the number of heads to ablate; by default all.
        higher_is_better: required for a metric that is a function, and only then; the direction of named metrics is
            known.
        layers: the layers to prune if `heads` is "all"; by default all.
        reference: as in `am.ablate_heads`.
        random: the number of random orders to compare the curve with; 0 for none.
        seed: draws the random orders, and the donors of "resample".
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`. With
            `journal`, a second file, ending in ".step", holds the current step; with `partial`, Ctrl-C returns the
            completed steps (`PruningCurve.complete` is then False).

    Returns:
        The order, and the metric of each text after each step.

    Raises:
        InputError: for invalid steps and draws, and the errors of `am.ablate_heads`.
        JournalError: if the journal belongs to another run.

    Source: Michel et al. 2019.
    """
    require_model(model)
    optional_flag("higher_is_better", higher_is_better)
    inputs, chosen = reread(inputs), model.check_heads(heads, layers)
    most = len(chosen)
    count = most if steps is None else whole_number("steps", steps, least=1, most=most, most_is="the heads chosen")
    draws, seed = whole_number("random", random), checked_seed(seed)
    ablations = Ablations.of(
        model, inputs, chosen, method, reference=reference, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    noted = {**ablations.options, "heads": "all" if isinstance(heads, str) else list(map(list, chosen)), "seed": seed}

    acting = {head: ablations.of_head(head) for head in chosen}
    of_texts: dict[str, Any] = {
        name: options[name] for name in ("answers", "against", "bos", "memory") if name in options
    }
    sweeps, engine = Sweeps(model, inputs, metric, noted=noted, **of_texts), options.get("engine", "local")

    def measure(changes: Sequence[tuple[Head, ...]], file: Path | None = None, **how: bool) -> Swept:
        # All changes share the same objects, so that a sweep runs their common part only once.
        acts: list[tuple[Intervention, ...]] = [tuple(acting[head] for head in ablated) for ablated in changes]
        return sweeps.sweep(acts, journal=file, engine=engine, **how)

    whole, judge = measure([()]), sweeps.judge
    better = _better(judge, higher_is_better)
    orders = _random_orders(chosen, draws, seed)
    drawn = [order[:step] for order in orders for step in range(1, count + 1)]
    file = step_file = None
    order: list[Head] = []
    after: list[Tensor] = []
    if (journal := options.get("journal")) is not None:
        rest = {
            "heads": [ablations.of_head(head).digest for head in chosen], "steps": count, "higher is better": better,
            "random orders": draws,
        }  # fmt: skip
        file = Journal(path_of(journal), identity_of_sweep(model, whole.provenance, judge, rest))
        step_file = file.path.with_name(f"{file.path.name}.step")
        order, after = _resumed(file, measure, model.dtype)
    measured: Swept | None = None
    with bar_of(
        "pruning", count * (2 * len(chosen) - count + 1) // 2 + len(drawn), show=options.get("progress", False)
    ) as bar:
        try:
            bar.advance(sum(len(chosen) - step for step in range(len(order))))
            while len(order) < count:
                head, metrics = _next_step(measure, chosen, order, better, step_file)
                order.append(head)
                after.append(metrics)
                if file is not None:
                    entry = {"order": torch.tensor(order), "after": torch.stack(after)}
                    file.write(Entry(entry, len(order), ""))
                bar.advance(len(chosen) - len(order) + 1)
            if drawn:
                measured = measure(drawn, step_file, partial=options.get("partial", False))
                bar.advance(len(drawn))
        except KeyboardInterrupt:
            if not options.get("partial") or not order:
                raise
    values = torch.full((draws, len(order), whole.documents), torch.nan, dtype=torch.float64)
    if measured is not None:
        values = measured.after.reshape(values.shape)
    curve = PruningCurve(
        judge.name, method, better, tuple(order), count, whole.before, torch.stack(after), tuple(orders), values,
        whole.tokens, whole.provenance,
    )  # fmt: skip
    if not curve.complete:
        leave(journal)
    return curve


def _next_step(
    measure: Callable[..., Swept], heads: Sequence[Head], order: Sequence[Head], better: bool, file: Path | None
) -> tuple[Head, Float[Tensor, " text"]]:
    """The head whose ablation, after those in `order`, hurts least, and the metric of each text without it."""
    left = [head for head in heads if head not in order]
    swept = measure([(*order, head) for head in left], file, keep=True)
    means = swept.after.mean(dim=-1)
    best = int(means.argmax() if better else means.argmin())
    return left[best], swept.after[best]


def _resumed(file: Journal, measure: Callable[..., Swept], precision: torch.dtype) -> tuple[list[Head], list[Tensor]]:
    """The heads ablated so far, and the metric after each; the last step is measured again, and must be the same."""
    entry = file.resume()
    if entry is None:
        return [], []
    order = [(layer, head) for layer, head in entry.tensors["order"].tolist()]
    after = list(entry.tensors["after"])
    (metric,) = measure([tuple(order)]).after
    count = counted(len(order), noun="head")
    names = [f"the metric of text {number} with {count} ablated" for number in range(len(metric))]
    file.require_same(names, after[-1], metric, precision)
    return order, after


def _random_orders(heads: Sequence[Head], draws: int, seed: int) -> list[tuple[Head, ...]]:
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randperm(len(heads), generator=generator).tolist() for _ in range(draws))
    return [tuple(heads[place] for place in order) for order in places]


def _better(judge: Metric, higher_is_better: bool | None) -> bool:
    if judge.name in HIGHER_IS_BETTER and judge.has_name:
        known = HIGHER_IS_BETTER[judge.name]
        if higher_is_better not in (None, known):
            raise InputError(
                f"for {judge.name}, {'higher' if known else 'lower'} is better; leave `higher_is_better` out."
            )
        return known
    if higher_is_better is None:
        raise InputError(
            f"a function as the metric ({judge.name}) needs `higher_is_better`: True, or False as for a loss."
        )
    return higher_is_better
