"""Advice on heads that repeat another head and could be removed; each removal is checked on other texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, option, whole_number
from ...basics.messages import capitalised
from ...basics.nouns import counted
from ...basics.public import public
from ...batch import Batch
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Head, Intervention
from ...maths.intervals import LEAST_TEXTS, TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.over_texts import OverTexts
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...runs.ablations import Ablations, reread
from ...runs.claims import interval_note, interval_of, no_interval
from ...runs.stream import stream
from ...runs.sweep import run_sweep
from .divergences import DivergenceReducer, Divergences, clustered
from .halves import halves

METHODS: Final = ("zero", "mean")
"""The possible replacements for the z of a removed head."""

VERDICTS: Final = ("holds", "fails", "undecided", "not tested")


@public
def pruning_advice(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    method: str = "zero",
    threshold: float = 0.05,
    tolerance: float = 0.01,
    most: int = 10,
    layers: Iterable[int] | None = None,
    rows: int = 64,
    seed: int = 0,
    bos: bool | None = None,
    memory: float = 1.0,
) -> "PruningAdvice":
    """Finds heads that repeat another head, and measures the cost of removing them on texts that did not form the
    advice.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> advice = am.pruning_advice(am.load(), documents(6), layers=[0], rows=8)
    >>> advice.removed, advice.repeats
    (((0, 4),), ((0, 3),))

    One half of the texts forms the advice. Heads with patterns that differ by a Jensen-Shannon divergence of at most
    `threshold` nats are clustered (average linkage), and in each cluster the head whose removal raises the loss on
    these texts least is advised for removal. The other half checks the advice: each advised head is removed alone, and
    the change of the loss has an interval over texts. Heads that attend alike may write differently, so advice may
    fail. The control is the mean change for the other heads of the same layer: the cost of a random head of that layer.

    A piece of advice holds if the simultaneous 95 % interval of its cost, over all pieces, lies below `tolerance`, and
    fails if the interval lies above; with fewer than five texts to check, advice is not tested.

    Args:
        model: the model.
        inputs: a list of texts, or an iterator, which becomes a list; copies of a text stay in the same half.
        method: "zero" replaces the z of a removed head with 0, "mean" with its mean over the texts that form the
            advice.
        threshold: the largest divergence of heads that repeat each other, in nats; the maximum is ln 2 = 0.693.
        tolerance: the largest rise of the loss that does not matter, in nats.
        most: the largest number of pieces of advice to check, the most redundant first.
        layers: all by default.
        rows: the number of rows of each text on which heads of different layers are compared; 0 compares heads of the
            same layer only.
        seed: the seed of the halves and of the sampled rows.
        bos: whether each text begins with the tokenizer's BOS or CLS token.
        memory: the memory that the ablations may use on top of the model, in GB.

    Returns:
        Each piece of advice with its cost, control and verdict.

    Raises:
        InputError: for a model that predicts neither next nor masked tokens, for fewer than two different texts, and in
            the cases of `am.redundancy` and `am.ablate_heads`.

    """
    require_model(model)
    threshold = finite_number("threshold", threshold, above=0.0)
    tolerance = finite_number("tolerance", tolerance, above=0.0)
    most, rows = whole_number("most", most, least=1), whole_number("rows", rows)
    option("method", method, METHODS)
    seed = whole_number("seed", seed, most=2**63 - 1)
    if model.predicts not in ("next token", "masked token"):
        raise InputError(
            f"advice is checked by the loss on next or masked tokens, which {model.name} does not predict; use "
            "am.redundancy to find heads that attend alike, and am.ablate_set to measure their removal."
        )
    stack = model.output_stack
    forming, checking = halves(model, reread(inputs), bos=bos, seed=seed)
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    alike = _alike(model, forming, chosen, rows, seed)
    places = [(layer, head) for layer in chosen for head in range(alike.heads)]
    # Heads that were not compared count as fully different.
    apart = alike.whole.flatten(2).flatten(0, 1).nan_to_num(math.log(2))
    clusters = [cluster for cluster in clustered(places, apart, threshold) if len(cluster) > 1]
    low, high = (alike.between_all(end).flatten(2).flatten(0, 1) for end in alike.everywhere.simultaneous())

    ablations = Ablations.of(
        model, forming, [(layer, 0) for layer in chosen], method, reference=iter(forming) if method == "mean" else None,
        bos=bos,
    )  # fmt: skip

    def costs(texts: Sequence[Batch], changes: Sequence[Sequence[Head]]) -> "tuple[_Costs, Provenance]":
        acts: list[tuple[Intervention, ...]] = [tuple(map(ablations.of_head, heads)) for heads in changes]
        noted = {**ablations.options, "threshold": threshold, "rows": rows, "seed": seed, "forming": _count(forming)}
        swept = run_sweep(model, iter(texts), acts, "loss", bos=bos, memory=memory, noted=noted)
        by_change = zip(changes, swept.after - swept.before, strict=True)
        return _Costs({tuple(heads): values for heads, values in by_change}, swept.before), swept.provenance

    formed, _ = costs(forming, [[head] for cluster in clusters for head in cluster])
    advised = [_least_harmful(cluster, formed, places, apart) for cluster in clusters]
    advised.sort(key=lambda pair: float(apart[places.index(pair[0]), places.index(pair[1])]))
    advised = advised[:most]
    removed, repeats = [tuple(pair[side] for pair in advised) for side in (0, 1)]
    others = {
        head: [(head[0], other) for other in range(alike.heads) if (head[0], other) not in removed] for head in removed
    }
    alone = dict.fromkeys([*removed, *(other for controls in others.values() for other in controls)])
    checked, provenance = costs(checking, [*([head] for head in alone), *([removed] if len(removed) > 1 else [])])
    at = tuple(torch.tensor([places.index(head) for head in side], dtype=torch.long) for side in (removed, repeats))
    return PruningAdvice(
        method=method,
        threshold=threshold,
        tolerance=tolerance,
        removed=removed,
        repeats=repeats,
        clusters=tuple(next(cluster for cluster in clusters if head in cluster) for head in removed),
        divergence=apart[at],
        divergence_low=low[at].clamp_min(0.0),
        divergence_high=high[at].clamp_max(math.log(2)),
        closest=float((apart + torch.eye(len(apart))).min()),
        formed=formed.of([[head] for head in removed]),
        before=checked.before,
        cost=checked.of([[head] for head in removed]),
        control=checked.means([others[head] for head in removed]),
        together=checked.of([removed] if removed else []).mean(dim=0),
        forming=_count(forming),
        provenance=provenance,
    )


def _count(batches: Sequence[Batch]) -> int:
    return sum(len(batch.ids) for batch in batches)


def _alike(model: HookedModel, texts: Sequence[Batch], layers: Sequence[int], rows: int, seed: int) -> Divergences:
    reducer = DivergenceReducer(rows, seed)
    (state,) = stream(model, iter(texts), [reducer], layers=layers, stack=model.output_stack.label or None)
    return Divergences(state)


@dataclass(frozen=True)
class _Costs:
    """The change of each text's loss for each set of removed heads."""

    by_heads: Mapping[tuple[Head, ...], Float[Tensor, " text"]]
    before: Float[Tensor, " text"]

    def of(self, sets: Sequence[Sequence[Head]]) -> Float[Tensor, "set text"]:
        """Measures the changes for some sets of heads."""
        changes = [self.by_heads[tuple(heads)] for heads in sets]
        return torch.stack(changes) if changes else self.before.new_zeros(0, len(self.before))

    def means(self, many: Sequence[Sequence[Head]]) -> Float[Tensor, "set text"]:
        """The mean change over heads removed one at a time; NaN for an empty list."""
        nothing = torch.full_like(self.before, torch.nan)
        changes = [self.of([[head] for head in heads]).mean(dim=0) if heads else nothing for heads in many]
        return torch.stack(changes) if changes else self.before.new_zeros(0, len(self.before))


def _least_harmful(
    cluster: Sequence[Head], formed: _Costs, places: Sequence[Head], apart: Float[Tensor, "head head"]
) -> tuple[Head, Head]:
    """Returns the head of a cluster that costs least to remove, and the head that it repeats most closely."""
    removed = min(cluster, key=lambda head: float(formed.by_heads[(head,)].mean()))
    others = [head for head in cluster if head != removed]
    nearest = min(others, key=lambda head: float(apart[places.index(removed), places.index(head)]))
    return removed, nearest


@dataclass(frozen=True, repr=False)
class PruningAdvice(OverTexts, PagedResult):
    """Heads that repeat another head, and the cost of removing them on texts that did not form the advice.

    Costs are changes of the loss, in nats; intervals are over the texts that check the advice.
    """

    SUBTRACT = "two results advise different heads; subtract the results of am.ablate_heads"

    method: str
    threshold: float
    tolerance: float
    """The largest cost that does not matter, in nats."""
    removed: tuple[Head, ...]
    """The heads advised for removal, the most redundant first."""
    repeats: tuple[Head, ...]
    """For each removed head, the head that it repeats most closely."""
    clusters: tuple[tuple[Head, ...], ...]
    """For each removed head, the cluster of heads that attend alike."""
    divergence: Float[Tensor, " advice"]
    """The divergence between the two heads, in nats, on the texts that form the advice. `divergence_low` and
    `divergence_high` are its simultaneous interval over all pairs of heads, NaN for fewer than five texts.
    """
    divergence_low: Float[Tensor, " advice"]
    divergence_high: Float[Tensor, " advice"]
    closest: float
    """The smallest divergence between any two heads."""
    formed: Float[Tensor, "advice forming_text"]
    """The cost on the texts that form the advice, by which the head was selected."""
    before: Float[Tensor, " text"]
    """The loss on each checking text with all heads."""
    cost: Float[Tensor, "advice text"]
    """The cost of removing each head alone, on each checking text."""
    control: Float[Tensor, "advice text"]
    """The mean cost of the heads of the same layer that are not advised; NaN where there are none."""
    together: Float[Tensor, " text"]
    """The cost of removing all advised heads at once."""
    forming: int
    """The number of texts that form the advice."""
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The number of pieces of advice and of texts."""
        return {"advice": len(self.removed), "text": len(self.before), "forming_text": self.forming}

    def _check(self) -> None:
        super()._check()
        if not len(self.removed) == len(self.repeats) == len(self.clusters):
            raise ValueError(f"`repeats` and `clusters` must have {len(self.removed)} entries each")

    @property
    def _measured_values(self) -> Float[Tensor, "advice text"]:
        return self.cost

    @cached_property
    def against_control(self) -> TextMeans:
        """Cost − control, text by text."""
        return TextMeans.of_values(self.cost - self.control, self._copies)

    @property
    def verdict(self) -> tuple[str, ...]:
        """The verdict of the check on each piece of advice, one of `VERDICTS`."""
        low, high = self.simultaneous()
        return tuple(map(self._verdict, low.tolist(), high.tolist()))

    def _verdict(self, low: float, high: float) -> str:
        if math.isnan(low):
            return "not tested"
        return "holds" if high <= self.tolerance else "fails" if low > self.tolerance else "undecided"

    def to_frame(self) -> pd.DataFrame:
        """One row per piece of advice, the most redundant first.

        Columns: layer, head, repeats_layer, repeats_head, divergence with its interval; formed, the cost on the texts
        that formed the advice; cost, on the other texts, with its pointwise interval and whether it is clear; control;
        against_control, cost − control with its pointwise interval; verdict.
        """
        low, high = self.against_control.interval()
        frame = pd.DataFrame(
            {
                **_places("", self.removed),
                **_places("repeats_", self.repeats),
                "divergence": self.divergence.numpy(),
                "divergence_low": self.divergence_low.numpy(),
                "divergence_high": self.divergence_high.numpy(),
                "formed": self.formed.mean(dim=-1).numpy(),
                **{name: value.numpy() for name, value in self._columns("cost").items()},
                "control": self.control.mean(dim=-1).numpy(),
                "against_control": self.against_control.mean.numpy(),
                "against_control_low": low.numpy(),
                "against_control_high": high.numpy(),
                "verdict": list(self.verdict),
            }
        )
        frame.attrs["intervals"] = interval_note(self._distinct, len(self.before) - self._distinct)
        return frame

    def plot(self) -> "go.Figure":
        """Draws the cost of each advised head and of a random head of its layer; returned, not shown."""
        rows = [f"{_name(one)} (repeats {_name(other)})" for one, other in zip(self.removed, self.repeats, strict=True)]
        rows_of_values = []
        for name, values in (("advised head", self.cost), ("random head of its layer", self.control)):
            means = TextMeans.of_values(values, self._copies)
            low, high = means.interval()
            rows_of_values.append((name, means.mean.numpy(), low.numpy(), high.numpy()))
        return interval_rows(rows, rows_of_values, label="change of the loss, nats")

    @property
    def sentences(self) -> tuple[str, ...]:
        """The finding for each piece of advice, in words."""
        low, high = self.simultaneous()
        return tuple(self._told(number, *map(float, ends)) for number, ends in enumerate(zip(low, high, strict=True)))

    def _told(self, number: int, low: float, high: float) -> str:
        texts, count = len(self.before), len(self.removed)
        span = interval_of((low, high), ".3g", count, "pieces of advice")
        control = float(self.control[number].mean())
        layer = self.removed[number][0]
        against = "" if math.isnan(control) else f"; a random head of layer {layer} costs {control:.3g}"
        return with_minus_signs(
            f"removing {_name(self.removed[number])}, which repeats {_name(self.repeats[number])} "
            f"(JS {float(self.divergence[number]):.2g} nats), costs {float(self.cost[number].mean()):.3g} nats{span} "
            f"on {counted(texts, self._distinct, 'other text')}{against}"
        )

    @property
    def lead(self) -> str:
        """The finding in one paragraph."""
        formed = f"{self.forming} {'text' if self.forming == 1 else 'texts'}"
        if not self.removed:
            return (
                f"No two heads attend alike on {formed}: the closest pair differs by {self.closest:.2g} nats, above "
                f"the threshold of {self.threshold:g}, so no head is advised for removal."
            )
        first = self.sentences[0]
        sentence = f"{capitalised(first)}{no_interval(self._distinct)}."
        if self._distinct < LEAST_TEXTS:
            return sentence
        counted = [(self.verdict.count(name), name) for name in VERDICTS]
        verdicts = ", ".join(f"{count} {name}" for count, name in counted if count)
        if len(self.removed) == 1:
            return f"{sentence} The advice, formed on {formed}, {self._whether[self.verdict[0]]}."
        together = float(self.together.mean())
        return with_minus_signs(
            f"{sentence} Of {len(self.removed)} pieces of advice, formed on {formed} (tolerance {self.tolerance:g} "
            f"nats): {verdicts}. Removing all advised heads at once costs {together:.3g} nats."
        )

    @property
    def _whether(self) -> Mapping[str, str]:
        limit = f"{self.tolerance:g} nats"
        return {
            "holds": f"holds: the cost is below {limit}",
            "fails": f"fails: the cost is above {limit}",
            "undecided": f"is undecided: the cost may be above or below {limit}",
        }

    @property
    def _title(self) -> str:
        return f"Heads of {self.provenance.model} that could be removed"

    def _sections(self) -> "Sequence[Section]":
        if not self.removed:
            return []
        caveat = (
            "Heads that attend alike may still write different vectors. Each head was removed alone; the cost of "
            "removing several is not the sum of their costs."
        )
        reading = (
            "Each row is a head that attends like another head. One mark is the change of the loss when the head is "
            f"removed, the other the mean change over the other heads of its layer, on the {len(self.before)} texts "
            "that did not form the advice. "
            "Lines are 95 % intervals over texts."
        )
        return [
            Section("Pruning advice and its check", reading, {"advice": self.plot()}, "advice.plot()", caveat=caveat)
        ]


def _name(head: Head) -> str:
    return f"L{head[0]}H{head[1]}"


def _places(prefix: str, heads: Sequence[Head]) -> dict[str, list[int]]:
    layers, numbers = [head[0] for head in heads], [head[1] for head in heads]
    return {f"{prefix}layer": layers, f"{prefix}head": numbers}
