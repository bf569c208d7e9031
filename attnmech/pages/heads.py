"""What a page says about each head: the numbers of its map, a sentence, a card, and the finding at the top."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from ..basics.messages import capitalised
from ..basics.nouns import Nouns, counted
from ..draw.heads import HeadNumber, PageHeads
from ..draw.numbers import ScoreNumbers
from ..draw.text import percent, signed, visible_token, with_minus_signs
from ..maths.outliers import spread_of
from ..methods.focus.attention_focus import AttentionFocus
from ..methods.head_types.figures import letter_of
from ..methods.head_types.formulas import POSITIONAL
from ..methods.head_types.head_types import RESTING, HeadTypes, top_scores, why_unclaimed
from ..methods.null_attention.result import NullAttention
from ..methods.scores.decompose_scores import ScoreDecomposition, head_numbers
from ..methods.updates.result import ResidualUpdates
from ..results.head_page import robust
from ..runs.effects import HeadEffects
from ..runs.row_means import RowMeans
from .start import TellingRow, TellingRows

T = TypeVar("T")

FURTHEST: Final = 3  # the number of statistics on a card

ALIKE: Final = 3  # the number of similar heads on a card

LOOKS, WHY, WRITES, MATTERS, _TYPES = "where it attends", "why there", "what it writes", "does it matter?", "types"


@dataclass(frozen=True)
class Headline:
    """A finding about one head."""

    sentence: str
    place: tuple[int, int]  # the layer and head


@dataclass(frozen=True, kw_only=True)
class HeadFacts(ABC):
    """The results from which a page describes its heads."""

    layers: Sequence[int]  # the layers shown
    count: int  # the number of heads in each layer
    focus: AttentionFocus
    updates: ResidualUpdates | None
    types: HeadTypes | None
    effects: HeadEffects | None
    null: NullAttention | None
    effects_on: str = ""  # the texts on which heads were ablated, in words
    nouns: Nouns

    @classmethod
    def of(cls, results: Any, **own: Any) -> Self:
        """The facts of a report or an atlas, which holds results under the names of the fields, besides its `own`."""
        names = [entry.name for entry in fields(cls) if entry.name not in own]
        return cls(**{name: getattr(results, name) for name in names}, **own)

    @property
    def page(self) -> PageHeads:
        """The map's numbers, and a sentence and a card for every head shown."""
        types = self.each(self.types_of)
        names = [name for heads in types for of_head in heads for name in of_head]
        return PageHeads(
            self.layers,
            self.count,
            types=types,
            letters={name: letter_of(name) for name in sorted(set(names), key=lambda name: -names.count(name))},
            numbers=self.numbers,
            sentences=self.each(self._sentence),
            attended=self.attended,
            order=self._order(self.compared),
            card=self._card(),
        )

    @abstractmethod
    def _card(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """The entries of each head's card, by their labels."""

    @property
    @abstractmethod
    def further_numbers(self) -> Sequence[HeadNumber]:
        """The numbers that only this kind of page has."""

    @property
    def attended(self) -> Sequence[Sequence[Mapping[str, int]]]:
        """In how many of the rows shown each head attends to each token; empty without rows."""
        return ()

    @property
    def headlines(self) -> list["Headline"]:
        """Findings about single heads: the most telling row, the clearest type, the largest clear effect."""
        findings = (self.telling, self._clearest_type, self._largest_effect)
        return [headline for headline in findings if headline is not None]

    @property
    def by_head(self) -> list[list[str]]:
        """The headline of each chosen head: its finding, or else a sentence about it; empty without findings."""
        findings = {finding.place: finding.sentence for finding in reversed(self.headlines)}
        return self.each(lambda *place: findings.get(place) or self._headline(*place)) if findings else []

    def _headline(self, layer: int, head: int) -> str:
        return self._sentence(layer, head)

    @property
    def telling(self) -> "Headline | None":
        """The finding about the page's text; None on a page about a corpus."""
        return None

    def _order(self, numbers: Sequence[HeadNumber]) -> list[int]:
        """The heads, counted layer by layer: first those of the findings, then those with a clear effect or a type, of
        types those that rest last; of equal ones, first those with a number far from the median.
        """
        of_findings = {headline.place for headline in self.headlines}
        clear = None if self.effects is None else self.effects.clear

        def kind(layer: int, head: int) -> int:
            types = self.types_of(layer, head)
            if (layer, head) in of_findings:
                return 0
            if set(types).difference(RESTING) or (clear is not None and bool(clear[layer, head])):
                return 1
            return 2 if types else 3

        kinds: Int[np.ndarray, "layer head"] = np.array(self.each(kind))
        far = robust(numbers).amax(dim=0).numpy() if numbers else np.zeros(kinds.shape)
        return [int(place) for place in np.lexsort((-far.ravel(), kinds.ravel()))]

    @cached_property
    def numbers(self) -> list[HeadNumber]:
        """The numbers of all heads, for the map and the scatter."""
        listed = list(self._statistics(self.focus, LOOKS))
        listed += self.further_numbers
        if self.updates is not None:
            listed += self._statistics(self.updates, WRITES)
        if self.effects is not None:
            clear = None if self._effect_ends is None else self.effects.clear[list(self.layers)].numpy()
            effect = self._array(self.effects.effect)
            label = f"change in {self.effects.metric} without it, nats"
            both = self._effect_ends
            ends = None if both is None else (self._array(both[0]), self._array(both[1]))
            listed.append(HeadNumber("effect", label, MATTERS, effect, clear, ends))
        if self.null is not None:
            mass = self._array(self.null.sink_mass)
            listed.append(HeadNumber("sink_mass", f"p of the {self.nouns.first}, over texts", MATTERS, mass))
        if self.types is not None:
            claimed = {kind for heads in self.each(self.types_of) for kinds in heads for kind in kinds}
            for name in [name for name in self.types.scores if name in claimed]:
                label = f"{name}: mean p of its targets"
                key = f"type_{name.replace(' ', '_')}"
                listed.append(HeadNumber(key, label, _TYPES, self._array(self.types.scores[name])))
        return [number for number in listed if np.isfinite(number.values).any()]

    @property
    def compared(self) -> list[HeadNumber]:
        """The numbers by which heads are compared: all but the scores of types."""
        return [number for number in self.numbers if number.group != _TYPES]

    def _statistics(self, result: RowMeans, group: str) -> Iterable[HeadNumber]:
        for statistic in map(result.STATISTICS.__getitem__, result.quantities):
            label = statistic.axis.replace("<br>", " ").replace("the first token", f"the {self.nouns.first}")
            label = label.replace("token", self.nouns.token)
            yield self._mean(result, statistic.name, statistic.name, label, group)

    def _mean(self, result: RowMeans, statistic: str, name: str, label: str, group: str) -> HeadNumber:
        """A mean over rows, with its interval over texts."""
        low, high = map(self._array, result[statistic].interval())
        return HeadNumber(name, label, group, self._array(result[statistic].mean), ends=(low, high))

    def _array(self, values: torch.Tensor) -> Float[np.ndarray, "layer head"]:
        return values[list(self.layers)].double().numpy()

    def each(self, of_head: Callable[[int, int], T]) -> list[list[T]]:
        """What a function returns for each layer and head."""
        return [[of_head(layer, head) for head in range(self.count)] for layer in self.layers]

    def types_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The claimed types of a head, the strongest first."""
        return () if self.types is None else self.types.types_of(layer, head)

    def _sentence(self, layer: int, head: int) -> str:
        kinds, name = self.types_of(layer, head), f"L{layer}H{head}"
        if kinds:
            return f"{self._where(kinds[0])}{name} {self._does(layer, head, kinds[0])}."
        return f"{name}: {'no type is claimed' if self.types is not None else 'types were not measured'}."

    def _where(self, kind: str) -> str:
        types = self.types
        return "In random repeated text, " if types is not None and types.generated and kind in types.scores else ""

    def _does(self, layer: int, head: int, kind: str) -> str:
        return f"gives {self._share(layer, head, kind)}"

    def _share(self, layer: int, head: int, kind: str) -> str:
        score, baseline, low, high = (percent(number, 0) for number in self._claims[layer, head, kind])
        compared = "if uniform" if kind in POSITIONAL else "by distance alone"
        return (
            f"{score} of its attention to {_TARGETS.get(kind, f'the token {kind}')} "
            f"(95 % interval {low} to {high}; {compared}: {baseline})"
        )

    @cached_property
    def _claims(self) -> dict[tuple[int, int, str], tuple[float, float, float, float]]:
        assert self.types is not None
        claims: Any = self.types.to_frame().itertuples()
        return {
            (claim.layer, claim.head, claim.type): (claim.score, claim.baseline, claim.score_low, claim.score_high)
            for claim in claims
        }

    def _type(self, layer: int, head: int) -> str:
        kinds = self.types_of(layer, head)
        if kinds:
            return "\n".join(f"{kind}: {self._where(kind).lower()}{self._share(layer, head, kind)}" for kind in kinds)
        if self.types is None:
            return ""
        return f"{why_unclaimed(self.types, layer, head)} Highest scores: {top_scores(self.types, layer, head)}."

    def _example(self, layer: int, head: int) -> str:
        example = None if self.types is None else self.types.example_of(layer, head)
        if example is None:
            return ""
        key = f"[{visible_token(example.around[example.key_at])}]"
        around = [visible_token(token) for token in example.around]
        around[example.key_at] = key
        query = [visible_token(token) for token in example.before]
        query[-1] = f"{query[-1]} →"
        return f"{' '.join(query)} {percent(example.weight, 0)} to {' '.join(around)}"

    def _named_alike(self, alike: Float[np.ndarray, "head_of_all head_of_all"]) -> list[list[str]]:
        def names(layer: int, head: int) -> str:
            at = self.layers.index(layer) * self.count + head
            order = [int(other) for other in np.argsort(-alike[at], kind="stable")[:ALIKE]]
            known = [other for other in order if np.isfinite(alike[at, other])]
            return ", ".join(
                f"L{self.layers[other // self.count]}H{other % self.count} ({alike[at, other]:.2f})" for other in known
            )

        return self.each(names)

    def _effect(self, layer: int, head: int) -> str:
        if self.effects is None or not bool(self.effects.effect[layer, head].isfinite()):
            return ""
        change = signed(float(self.effects.effect[layer, head]), ".3f")
        sentence = f"{self.effects.metric} {change} nats{self._on_texts}"
        if self._effect_ends is not None and bool(self._effect_ends[0][layer, head].isfinite()):
            low, high = (signed(float(end[layer, head]), ".3f") for end in self._effect_ends)
            doubt = (
                "" if self.effects.clear_size[layer, head]
                else "; its direction is certain, its size is not" if self.effects.clear[layer, head] else "; not clear"
            )  # fmt: skip
            sentence += f" (95 % interval, corrected for all heads: {low} to {high}{doubt})"
        verdict = "" if self.null is None else self.null.verdict[layer][head]
        return f"{sentence}\nAttention to the first token: {verdict}" if verdict else sentence

    @property
    def _on_texts(self) -> str:
        return f" on {self.effects_on}" if self.effects_on else ""

    @cached_property
    def _effect_ends(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The intervals of all effects; None if there are too few texts."""
        assert self.effects is not None
        low, high = self.effects.simultaneous()
        return (low, high) if bool(low.isfinite().any()) else None

    @property
    def _largest_effect(self) -> "Headline | None":
        if self.effects is None or self._effect_ends is None:
            return None
        size = self._array(self.effects.effect.abs() * self.effects.clear_size)
        row, head = np.unravel_index(np.nan_to_num(size).argmax(), size.shape)
        if not size[row, head] > 0:
            return None
        layer, place = self.layers[row], (self.layers[row], int(head))
        value = float(self.effects.effect[place])
        low, high = sorted(abs(float(end[place])) for end in self._effect_ends)
        kinds = self.types_of(*place)
        kind = f" (type {kinds[0]})" if kinds else ""
        swept = int(self.effects.swept.sum())
        return Headline(
            f"Zeroing L{layer}H{head}{kind} {'raises' if value > 0 else 'lowers'} the {self.effects.metric} by "
            f"{abs(value):.2f} nats{self._on_texts} (95 % interval, corrected for {counted(swept, noun='head')}"
            f": {low:.2f} to {high:.2f}).",
            place,
        )

    @property
    def untyped(self) -> Mapping[str, str]:
        """The heads with a clear effect for which no type is claimed, the largest effect first, under a question."""
        effects = self.effects
        if effects is None or self.types is None or self._effect_ends is None:
            return {}
        places = [(layer, head) for layer in self.layers for head in range(self.count)]
        clear = [place for place in places if bool(effects.clear[place])]
        without = [place for place in clear if not self.types_of(*place)]
        without.sort(key=lambda place: -abs(float(effects.effect[place])))
        named = ", ".join(f"L{at[0]}H{at[1]} ({signed(float(effects.effect[at]), '.3f')})" for at in without)
        listed = f": {named}, in nats of {effects.metric}" if without else ""
        sentence = f"{len(without)} of {counted(len(clear), noun='head')} with a clear effect{listed}."
        return {"Effect without a type": sentence} if clear else {}

    @property
    def _clearest_type(self) -> "Headline | None":
        """The head that belongs most clearly to a type, preferably one that does not rest on one token."""
        if self.types is None or self.types.example is None or self.types.example[0] not in self.layers:
            return None
        layer, head = self.types.example
        kinds = self.types.types_of(layer, head)
        kind = next((kind for kind in kinds if kind not in RESTING), kinds[0])
        return Headline(f"{self._where(kind)}L{layer}H{head} gives {self._share(layer, head, kind)}.", (layer, head))


_TARGETS: Final = {  # the targets of each type, in words; "3 back" is the token 3 back
    "previous": "the previous token",
    "next": "the next token",
    "self": "the token itself",
    "first": "the first token",
    "sentence end": "ends of sentences",
    "comma": "commas",
    "special": "special tokens",
    "media": "images and sounds",
    "duplicate": "earlier copies of the token",
    "induction": "the token after an earlier copy",
}


def furthest(numbers: Sequence[HeadNumber]) -> list[list[str]]:
    """For each head, its numbers furthest from the median of all heads, by their robust scores."""
    if not numbers:
        return []
    layers, heads = numbers[0].values.shape
    values = [torch.tensor(number.values) for number in numbers]
    scores = robust(numbers)
    medians = [spread_of(value.flatten())[0] for value in values]

    def of_head(layer: int, head: int) -> str:
        order = scores[:, layer, head].argsort(descending=True, stable=True)[:FURTHEST].tolist()
        lines = (
            f"{numbers[at].name.replace('_', ' ')}: {float(values[at][layer, head]):.3g} (median {medians[at]:.3g})"
            for at in order
            if scores[at, layer, head] > 0
        )
        return with_minus_signs("\n".join(lines))

    return [[of_head(layer, head) for head in range(heads)] for layer in range(layers)]


@dataclass(frozen=True, kw_only=True)
class TextHeads(HeadFacts):
    """The results from which a page about one text describes its heads."""

    view: ScoreNumbers
    scores: ScoreDecomposition

    def _card(self) -> Mapping[str, Sequence[Sequence[str]]]:
        return {
            f"On this {self.nouns.text}": self.each(self._here),
            "Type": self.each(self._type),
            "Clearest example": self.each(self._example),
            "Furthest from the median head": furthest(self.compared) or self.each(lambda layer, head: ""),
            "Heads that attend alike": self._named_alike(most_alike(self.view.pattern)),
            "Without it": self.each(self._effect),
        }

    @property
    def further_numbers(self) -> list[HeadNumber]:
        """The terms' shares of the highest scores."""
        return head_numbers(self.scores, self.view)

    def _here(self, layer: int, head: int) -> str:
        """The head's most telling row, and the keys that it attends to most over all rows."""
        place = self.layers.index(layer)
        pattern, row = self.view.pattern[place, head], self.rows.of_head(place, head)
        if len(pattern) < 2 and not self.view.first:
            return ""
        mass = (pattern if self.view.first else pattern[1:]).mean(axis=0)
        top = np.argsort(-mass, kind="stable")[:3]
        parts = [f"{percent(float(mass[key]), 0)} to {self.view.named_key(int(key))}" for key in top if mass[key] > 0]
        mean = f"Mean attention: {', '.join(parts)}."
        return mean if row is None else f"{capitalised(row.sentence)}.\n{mean}"

    @cached_property
    def rows(self) -> TellingRows:
        """The rows of attention that tell most of heads."""
        return TellingRows(self.view)

    @property
    def telling(self) -> Headline | None:
        if self.rows.first is None:
            return None
        place, head, row = self.rows.first
        return Headline(self._told(self.layers[place], head, row), (self.layers[place], head))

    def _headline(self, layer: int, head: int) -> str:
        row = self.rows.of_head(self.layers.index(layer), head)
        return super()._headline(layer, head) if row is None else self._told(layer, head, row)

    def _told(self, layer: int, head: int, row: TellingRow) -> str:
        return f"On this {self.nouns.text}, L{layer}H{head} attends {row.sentence}."


def most_alike(pattern: Float[np.ndarray, "layer head query key"]) -> Float[np.ndarray, "head_of_all head_of_all"]:
    """The overlap of the attention of every two heads, mean over the rows with a choice: Σ_j √(p_ij q_ij), 0 to 1.

    A head's overlap with itself is NaN. Kailath 1967 (docs/formulas.md#similar-heads).

    >>> alike = most_alike(np.array([[[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]]]))
    >>> alike.round(3).tolist()
    [[nan, 0.707], [0.707, nan]]
    """
    layers, heads = pattern.shape[:2]
    choice = (pattern > 0).sum(axis=-1).max(axis=(0, 1)) > 1
    flat = torch.from_numpy(np.ascontiguousarray(pattern[:, :, choice])).clamp_min(0).sqrt().reshape(layers * heads, -1)
    overlap = (flat @ flat.T / max(1, int(choice.sum()))).double().numpy()
    np.fill_diagonal(overlap, np.nan)
    return overlap if choice.any() else np.full_like(overlap, np.nan)
