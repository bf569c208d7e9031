"""Null attention: ablations that test whether a head's attention to a sink has any effect.

Formulas: docs/formulas.md#null-attention. After Vig & Belinkov 2019, "Analyzing the Structure of Attention in a
Transformer Language Model".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.arguments import finite_number, option
from ...basics.nouns import bracketed, counted
from ...basics.public import public
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...maths.intervals import TextMeans
from ...maths.statistic import POSITIVE, UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import by_layer, subtracted
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.sentences import no_interval, unit_of
from ...results.table import TextResult, framed
from ...runs.ablations import reread
from ...runs.effects import HeadEffects, effects_of
from ...runs.engine import Change
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep
from .figures import verdict_map
from .formulas import VERDICTS, texts_to_decide, verdict_of
from .sums import FACTS, SINKS, Sinks, sinks_of

INTERVENTIONS: Final = {
    "remove": "the sink is hidden and the softmax recomputed",
    "zero_value": "the sink's value becomes 0",
    "mean_value": "the sink's value becomes the head's mean value",
    "only_sink": "the values of all keys except the sink become 0",
}
"""The interventions, in the order of measurement; each is applied to one head at a time."""


def _effect(name: str) -> Statistic:
    meaning = f"The change of the metric if {INTERVENTIONS[name]}."
    printed = name in ("remove", "zero_value")
    return Statistic(meaning=meaning, printed=printed, tested=True, bounds=UNBOUNDED)


@public
@owning_journal
def null_attention(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    heads: Heads = "all",
    metric: MetricLike = "loss",
    sink: str = "first",
    delta: float = 0.01,
    least_mass: float = 0.3,
    least_ratio: float = 0.5,
    layers: Iterable[int] | None = None,
    reference: Inputs | Iterable[Inputs] | None = None,
    **options: Unpack[SweepOptions],
) -> "NullAttention":
    """Tests, head by head, whether attention to a sink has an effect on the model's output.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> null = am.null_attention(am.load(), documents(6), layers=[0, 2])
    >>> null.sink_mass.shape, null.null_share.shape
    (torch.Size([4, 8]), torch.Size([4]))

    In GPT-2, 57 % of attention goes to the first token. Vig & Belinkov (2019) call this "null attention": the head
    has nothing to look for. This call tests that claim.

    Four interventions are measured on every head. "remove" hides the sink and recomputes the softmax (a row that
    sees no other key, such as row 0 of a causal model, then attends to nothing). "zero_value" sets the sink's value to
    0. "mean_value" sets it to the head's mean value over the other tokens of the inputs, or of `reference`. "only_sink"
    sets the values of all other keys to 0. Effects are `metric` after minus before.

    A head is "not attending" if its sink mass is below `least_mass`. Otherwise the verdict combines two tests. The head
    writes if its value ratio is at least `least_ratio`. What it writes matters if the whole interval of the effect of
    zero_value lies outside ±`delta`, and does not matter if the whole interval lies inside. "resting" heads write
    little, and it does not matter; "active" heads write, and it matters; "unused" heads write, and it does not matter;
    "subtle" heads write little, and it matters. A head is "undecided" if its interval crosses a bound;
    `NullAttention.texts_needed` estimates how many texts would decide it. Intervals are corrected for all heads that
    are changed (95 %, `HeadEffects.simultaneous`), so that verdicts are not chance findings among many heads. Intervals
    need at least five texts, and a few dozen to be useful.

    Args:
        model: the model.
        inputs: texts, or token ids.
        heads: a list of (layer, head); "all"; or "attending", which changes only heads with a sink mass of at least
            `least_mass`, because the verdict on the others follows from their sink mass alone.
        metric: as in `am.ablate_heads`.
        sink: the first token of each text ("first"); for each head, the key that receives most attention from the other
            rows of the text ("most_attended"); or all special tokens of the tokenizer ("special").
        delta: the largest effect that does not matter, in the metric's unit (nats for the loss).
        least_mass: the smallest sink mass at which a head counts as attending (ε = 0.3 in Gu et al. 2024).
        least_ratio: the smallest value ratio at which a head counts as writing.
        layers: the layers of the heads, if `heads` is not a list; all by default.
        reference: the texts over which "mean_value" takes its mean; by default the inputs.
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.

    Returns:
        Sink mass, value ratio, four effects and a verdict for each head, with intervals over texts.

    Raises:
        InputError: for invalid heads, sinks, bounds, metrics and answers.
        JournalError: if the journal belongs to another sweep.

    Source: Vig & Belinkov 2019; Gu et al. 2024.
    """
    require_model(model)
    bos, engine = options.get("bos"), options.get("engine", "local")
    delta = finite_number("delta", delta, above=0.0)
    least_mass = finite_number("least_mass", least_mass, above=0.0)
    least_ratio = finite_number("least_ratio", least_ratio, above=0.0)
    attending = isinstance(heads, str) and heads == "attending"
    inputs, chosen = reread(inputs), model.check_heads("all" if attending else heads, layers)
    touched = sorted({layer for layer, _ in chosen})
    label = model.output_stack.label
    sinks = sinks_of(model, inputs, sink, layers=touched, stack=label or None, bos=bos, engine=engine)
    others = sinks
    if reference is not None:
        others = sinks_of(model, reference, sink, layers=touched, stack=label or None, bos=bos, engine=engine)
    if others.mean_value.isnan().any():
        raise InputError("the texts must have tokens other than the sink; these texts have none.")
    means = {
        layer: Values({layer: mean[None, None].to(model.dtype)}, "the head's mean over other tokens")
        for layer, mean in zip(touched, others.mean_value, strict=True)
    }
    every = sinks.keys.expand(*sinks.facts.shape[1:3], -1, -1)
    keys = {(layer, head): every[touched.index(layer), head] for layer, head in chosen}
    changed = _attending(sinks, touched, chosen, least_mass) if attending else chosen
    swept = run_sweep(
        model,
        inputs,
        [change for head in changed for change in _changes(head, keys[head], means[head[0]], label)],
        metric,
        noted={
            "sink": sink,
            "heads": heads if isinstance(heads, str) else [list(head) for head in chosen],
            "mean value over": "inputs" if reference is None else "reference",
        },
        **options,
    )
    count = len(INTERVENTIONS)
    effects = {
        name: effects_of(model, changed, replace(swept, after=swept.after[place::count]), name)
        for place, name in enumerate(INTERVENTIONS)
    }
    asked = torch.zeros_like(effects["remove"].swept, dtype=torch.bool)
    asked[tuple(zip(*chosen, strict=True))] = True
    facts = by_layer(sinks.facts, touched, len(asked), axis=1).masked_fill(~asked[..., None], torch.nan)
    return NullAttention(sink, delta, least_mass, least_ratio, effects, facts, sinks.keys, swept.provenance)


def _attending(sinks: Sinks, layers: Sequence[int], heads: Sequence[Head], least_mass: float) -> list[Head]:
    """The heads that attend to the sink; if no head reaches `least_mass`, the head that attends to it most."""
    mass = sinks.facts[FACTS.index("sink_mass")].nanmean(dim=-1).nan_to_num(0.0)
    of_head = {(layer, head): float(mass[layers.index(layer), head]) for layer, head in heads}
    return [head for head in heads if of_head[head] >= least_mass] or [max(of_head, key=lambda head: of_head[head])]


def _changes(head: Head, sink: Bool[Tensor, "text key"], mean: Values, stack: str) -> list[Change]:
    made = {
        "remove": Intervention.remove_keys([head], sink, stack=stack),
        "zero_value": Intervention.zero_values([head], sink, stack=stack),
        "mean_value": Intervention.replace_values([head], sink, mean, stack=stack),
        "only_sink": Intervention.zero_values([head], ~sink, stack=stack),
    }
    return [(made[name],) for name in INTERVENTIONS]


class NullStatistics:
    """What a head does at its sink, and the effects of the `INTERVENTIONS` on it."""

    sink_mass = Statistic(
        meaning="Mean attention to the sink from the rows outside it; a row that cannot see the sink counts as 0.",
        unit="mean p",
        printed=True,
    )
    value_ratio = Statistic(
        meaning="‖v_sink W_O‖ / median_j ‖v_j W_O‖ over the other tokens j; with several special tokens, ‖v_sink W_O‖ "
        "is a mean over them, weighted by the attention that each receives.",
        unit="of the median",
        printed=True,
        bounds=POSITIVE,
    )
    update_at_sink = Statistic(
        meaning="The mean of ‖u‖ / ‖x‖ on the rows that attend most to the sink, excluding the sink's own row.",
        bounds=POSITIVE,
    )
    update_elsewhere = Statistic(
        meaning="The mean of ‖u‖ / ‖x‖ on the rows that attend most to another key.", bounds=POSITIVE
    )
    update_difference = Statistic(
        meaning="Update at the sink minus update elsewhere, over the texts that have rows of both kinds. Figure 10 "
        "claims that heads write less while they attend to the sink: that holds where the whole interval is below 0.",
        bounds=UNBOUNDED,
    )
    remove = _effect("remove")
    zero_value = _effect("zero_value")
    mean_value = _effect("mean_value")
    only_sink = _effect("only_sink")


@dataclass(frozen=True, repr=False)
class NullAttention(NullStatistics, TextResult):
    """How much each head attends to its sink, what it writes from there, and whether this matters.

    Every number is computed per text and then averaged over the texts that define it; it is NaN if no text does, and
    for heads that were not measured. In a difference, numbers are differences, and `verdict` says how verdicts changed.
    """

    _TITLE = "Null attention of {model}"
    _MAIN = "zero_value"

    sink: str
    """The kind of sink: "first", "most_attended" or "special"."""
    delta: float
    """An effect within ±delta counts as zero."""
    least_mass: float
    """The smallest sink mass at which a head counts as attending."""
    least_ratio: float
    """The smallest value ratio at which a head counts as writing."""
    effects: Mapping[str, HeadEffects]
    """The effects of "remove", "zero_value", "mean_value" and "only_sink"."""
    facts: Float[Tensor, "fact layer head text"]
    """Sink mass, value ratio, update at the sink and elsewhere, per text; NaN where a text does not define them."""
    sinks: Bool[Tensor, "#layer #head text key"]
    """True at the sink's tokens; empty in a difference, because its `parts` hold them."""
    provenance: Provenance

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with measured heads; numbers of other layers are NaN."""
        return tuple(self._asked.any(dim=-1).nonzero()[:, 0].tolist())

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        layers, heads = self._first.swept.shape
        return {"fact": len(FACTS), "layer": layers, "head": heads, "text": len(self._first.tokens)}

    def _check(self) -> None:
        if list(self.effects) != list(INTERVENTIONS):
            raise ValueError(f"`effects` must have the keys {', '.join(INTERVENTIONS)}; got {list(self.effects)}")
        super()._check()
        option("sink", self.sink, SINKS)

    @property
    def metric(self) -> str:
        """The metric in which effects are measured."""
        return self._first.metric

    @cached_property
    def verdict(self) -> tuple[tuple[str, ...], ...]:
        """The verdict on each head of each layer, by the rule of `am.null_attention`; "" for heads not measured.

        In the difference `one - other`: "resting" if both verdicts are "resting", "resting → active" if `one` says
        active and `other` resting, and "" if a head was measured in only one of them.
        """
        if self.parts is not None:
            now, before = (part.verdict for part in self.parts)
            return tuple(tuple(map(_changed, *rows)) for rows in zip(before, now, strict=True))
        low, high = self.effects["zero_value"].simultaneous()
        asked = self._asked
        bounds = {"delta": self.delta, "least_mass": self.least_mass, "least_ratio": self.least_ratio}
        return tuple(
            tuple(verdict_of(*numbers, **bounds) if measured else "" for measured, *numbers in zip(*rows, strict=True))
            for rows in zip(
                *(values.tolist() for values in (asked, self.sink_mass, self.value_ratio, low, high)), strict=True
            )
        )

    @cached_property
    def texts_needed(self) -> Float[Tensor, "layer head"]:
        """An estimate of how many texts would decide each undecided head, if the effect and its spread stay the same;
        NaN for other heads. Infinite where the effect lies at a bound. The interval of the effect narrows with √texts.
        """
        effects = self.effects["zero_value"]
        needed = torch.full_like(effects.effect, torch.nan)
        low, high = effects.simultaneous()
        for layer, row in enumerate(self.verdict):
            for head, name in enumerate(row):
                if name == "undecided":
                    at = layer, head
                    mean, *ends = (float(numbers[at]) for numbers in (effects.effect, low, high))
                    needed[at] = texts_to_decide(mean, (ends[0], ends[1]), int(effects["effect"].texts[at]), self.delta)
        return needed

    @property
    def null_share(self) -> Float[Tensor, " layer"]:
        """The share of a layer's attention that is null: (1/H) Σ_h sink mass, summed over its resting heads.

        The share is taken over the rows outside the sink. Undecided heads are not counted, so the true share may be
        larger. NaN unless all heads of the layer were measured.
        """
        if self.parts is not None:
            return self.parts[0].null_share - self.parts[1].null_share
        resting = torch.tensor([[name == "resting" for name in row] for row in self.verdict])
        share = self.sink_mass.masked_fill(~resting, 0.0).mean(dim=-1)
        return share.masked_fill(~self._asked.all(dim=-1), torch.nan)

    @property
    def complete(self) -> bool:
        """Whether every intervention was measured on every text; False if the sweep was interrupted."""
        return all(effects.complete for effects in self.effects.values())

    @property
    def _asked(self) -> Bool[Tensor, "layer head"]:
        """The heads that were examined, changed or not."""
        return ~self.facts.isnan().all(dim=-1).all(dim=0)

    @property
    def _first(self) -> HeadEffects:
        return next(iter(self.effects.values()))

    def _by_text(self, name: str) -> TextMeans:
        if name in INTERVENTIONS:
            return self.effects[name]._by_text("effect")
        facts = dict(zip(FACTS, self.facts, strict=True))
        return TextMeans.of_values(
            facts["update_at_sink"] - facts["update_elsewhere"] if name == "update_difference" else facts[name]
        )

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        return every.merged(self._first.provenance.copies)

    @property
    def _places(self) -> Places:
        layer, head = self._asked.nonzero().T
        rows = {"layer": layer.tolist(), "head": head.tolist()}
        return Places(rows, (layer, head), lambda place: f"L{place[0]}H{place[1]}")

    def _statistic(self, name: str) -> Statistic:
        unit = unit_of(self.metric) if name in INTERVENTIONS else self.STATISTICS[name].unit
        return replace(self.STATISTICS[name], unit=unit)

    def _clarity_prefix(self, name: str) -> str | None:
        return f"{name}_" if name in INTERVENTIONS else None

    def to_frame(self) -> pd.DataFrame:
        """One row per head: its numbers, every effect with its interval and whether it is clear of 0, and the verdict.

        Effects are NaN for heads that were not changed. `texts_needed` estimates how many texts would decide an
        undecided head.
        """
        frame, layers = super().to_frame(), self._places.columns
        frame["verdict"] = [
            self.verdict[layer][head] for layer, head in zip(layers["layer"], layers["head"], strict=True)
        ]
        return frame

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {} if self.parts else {"texts_needed": self.texts_needed}

    @property
    def note(self) -> str:
        return self._first.note

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads: each head's verdict as a colour and a letter, with its numbers in the hover box.

        For a difference, the map shows the effects of "zero_value" as colours.
        """
        if self.parts is not None or figure is not None:
            return super().plot(figure, layer=layer, head=head)
        rows = list(self.layers)
        labels = {"update_at_sink": "update at the sink", "update_difference": "difference"}
        numbers = {
            labels.get(name, name.replace("_", " ")): [
                values[rows].numpy() for values in (self[name].mean, *self[name].interval())
            ]
            for name in self.quantities
        }
        verdicts = [self.verdict[layer] for layer in rows]
        verdict = verdict_map(verdicts, numbers, layers=self.layers, null_share=self.null_share[rows].tolist())
        return framed(verdict, self.layers, layer, head)

    def _sections(self) -> "Sequence[Section]":
        heading = "Verdicts" if self.parts is None else "Effects of zeroing the sink's value"
        return [Section(heading, reading_of(self), {"null-attention": self.plot()}, "null.plot()")]

    @property
    def lead(self) -> str:
        """Counts the verdicts of all heads in one sentence."""
        verdicts = [name for row in self.verdict for name in row if name]
        if self.parts is not None:
            changed = [
                f"L{layer}H{head} {name}"
                for layer, row in enumerate(self.verdict)
                for head, name in enumerate(row)
                if "→" in name
            ]
            listed = f": {', '.join(changed[:_NAMED])}{', …' if len(changed) > _NAMED else ''}" if changed else ""
            return (
                f"{self._opening}{len(changed)} of {counted(len(verdicts), noun='head')} have a different verdict for "
                f"{SINKS[self.sink]} on {self._texts}{listed}."
            )
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
        part = "" if self.complete else "; stopped early, incomplete"
        needed = self.texts_needed[~self.texts_needed.isnan()].sort().values.tolist()
        half = needed[(len(needed) - 1) // 2] if needed else math.inf
        which = "the undecided head" if len(needed) == 1 else "half of the undecided heads"
        decide = "" if math.isinf(half) else f"; about {round(half):,} texts would decide {which}"
        return (
            f"Verdicts on {counted(len(verdicts), noun='head')} and {SINKS[self.sink]} "
            f"{bracketed(f'{self._texts}; effects within ±{self.delta:g} {unit_of(self.metric)} count as zero')}: "
            f"{counts}{decide}{no_interval(self._n_distinct)}{part}."
        )

    @property
    def _n_texts(self) -> int:
        return self._first._n_texts

    def _comparable(self) -> dict[str, Any]:
        bounds = {name: getattr(self, name) for name in ("sink", "delta", "least_mass", "least_ratio")}
        return bounds | self._first._comparable()

    def _minus(self, other: Self, paired: bool) -> Self:
        return replace(
            self,
            effects={name: effects - other.effects[name] for name, effects in self.effects.items()},
            facts=subtracted(self.facts, other.facts, paired),
            sinks=self.sinks[..., :0],
        )


_NAMED: Final = 5  # the largest number of heads that a sentence names


def _changed(before: str, now: str) -> str:
    """The verdict if both are equal, otherwise the change as `before → now`."""
    if not before or not now:
        return ""
    return now if before == now else f"{before} → {now}"


def reading_of(null: NullAttention) -> str:
    """How to read the map of verdicts."""
    if null.parts is not None:
        return "Each cell is one head: the difference between the two effects of zeroing the sink's value."
    done = "; ".join(f"{name.replace('_', ' ')}: {meaning}" for name, meaning in INTERVENTIONS.items())
    return (
        f"Each cell is one head. A head attends if its mean attention to {SINKS[null.sink]} is at least "
        f"{null.least_mass:g}. It writes if the norm of what it writes from the sink is at least {null.least_ratio:g} "
        "of the other tokens' median. What it writes matters if zeroing the sink's value changes the metric by more "
        f"than {null.delta:g} over the whole interval, and does not matter if the interval lies within "
        f"±{null.delta:g}; intervals are over texts, corrected for all heads that were changed. Resting: writes "
        "little, and it does not matter. Active: writes, and it matters. Unused: writes, and it does not matter. "
        "Subtle: writes little, and it matters. Beside each layer is the share of its attention that is null, that is, "
        f"the attention of resting heads to the sink. Interventions: {done}."
    )
