"""What a page says about each head: the numbers of its map, a sentence, a card, and the finding at the top."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float

from ..basics.nouns import Nouns
from ..draw.heads import HeadNumber, PageHeads
from ..draw.numbers import ScoreNumbers
from ..draw.text import percent, signed, visible_token, with_minus_signs
from ..maths.statistic import Statistic
from ..methods.focus.attention_focus import AttentionFocus
from ..methods.head_types.figures import letter_of
from ..methods.head_types.formulas import POSITIONAL
from ..methods.head_types.head_types import RESTING, HeadTypes
from ..methods.likeness.outliers import robust_scores, spread_of
from ..methods.null_attention.result import NullAttention
from ..methods.scores.decompose_scores import ScoreDecomposition
from ..methods.updates.result import ResidualUpdates
from ..runs.effects import HeadEffects
from .start import example_of

_OfHead = Callable[[int, int], str]

FURTHEST: Final = 3
"""The number of statistics on a card."""

ALIKE: Final = 3
"""The number of similar heads on a card."""

_LOOKS, _WRITES, _MATTERS, _TYPES = "where it attends", "what it writes", "does it matter?", "types"


@dataclass(frozen=True)
class Headline:
    """A finding about one head."""

    sentence: str
    place: tuple[int, int]
    """The layer and head."""


@dataclass(frozen=True)
class HeadFacts:
    """The results from which a page describes its heads."""

    view: ScoreNumbers
    scores: ScoreDecomposition
    focus: AttentionFocus
    updates: ResidualUpdates | None
    types: HeadTypes | None
    effects: HeadEffects | None
    null: NullAttention | None
    nouns: Nouns

    @property
    def page(self) -> PageHeads:
        """The map's numbers, and a sentence and a card for every head shown."""
        numbers = self._numbers
        compared = [number for number in numbers if number.group != _TYPES]
        types = [[self.types_of(layer, head) for head in self._heads] for layer in self.view.layers]
        names = [name for heads in types for of_head in heads for name in of_head]
        shown = sorted(set(names), key=lambda name: -names.count(name))
        alike = most_alike(self.view.pattern)
        return PageHeads(
            self._layers,
            len(self._heads),
            types=types,
            letters={name: letter_of(name) for name in shown},
            numbers=numbers,
            sentences=self._each(self._sentence),
            order=self._order(compared),
            card={
                "Type": self._each(self._type),
                "Clearest example": self._each(self._example),
                f"On this {self.nouns.text}": self._each(self._here),
                "Furthest from the median head": furthest(compared) if compared else self._each(lambda layer, head: ""),
                "Heads that attend alike": self._each(lambda layer, head: self._named_alike(alike, layer, head)),
                "Without it": self._each(self._effect),
            },
        )

    @property
    def headlines(self) -> list["Headline"]:
        """Findings about single heads: the largest clear effect, the clearest type, the strongest focus here."""
        findings = (self._largest_effect, self._clearest_type, self._most_focused)
        return [headline for headline in findings if headline is not None]

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

        kinds = np.array([[kind(layer, head) for head in self._heads] for layer in self._layers])
        far = robust(numbers).amax(dim=0).numpy() if numbers else np.zeros(kinds.shape)
        return [int(place) for place in np.lexsort((-far.ravel(), kinds.ravel()))]

    # -- numbers ------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> list[HeadNumber]:
        listed = list(self._statistics(self.focus.STATISTICS.values(), self.focus, _LOOKS))
        listed += self.scores.head_numbers(self.view)
        if self.updates is not None:
            listed += self._statistics(self.updates.STATISTICS.values(), self.updates, _WRITES)
        if self.effects is not None:
            clear = None if self._effect_ends is None else self.effects.clear[self._layers].numpy()
            effect = self._array(self.effects.effect)
            label = f"change in {self.effects.metric} without it, nats"
            listed.append(HeadNumber("effect", label, _MATTERS, effect, clear))
        if self.null is not None:
            mass = self._array(self.null.sink_mass)
            listed.append(HeadNumber("sink_mass", f"p of the {self.nouns.first}, over texts", _MATTERS, mass))
        if self.types is not None:
            claimed = {kind for layer in self._layers for head in self._heads for kind in self.types_of(layer, head)}
            for name in [name for name in self.types.scores if name in claimed]:
                label = f"{name}: mean p of its targets"
                key = f"type_{name.replace(' ', '_')}"
                listed.append(HeadNumber(key, label, _TYPES, self._array(self.types.scores[name])))
        return [number for number in listed if np.isfinite(number.values).any()]

    def _statistics(
        self, statistics: Iterable[Statistic], result: AttentionFocus | ResidualUpdates, group: str
    ) -> Iterable[HeadNumber]:
        for statistic in statistics:
            label = statistic.axis.replace("<br>", " ").replace("the first token", f"the {self.nouns.first}")
            values = self._array(getattr(result, statistic.name))
            yield HeadNumber(statistic.name, label.replace("token", self.nouns.token), group, values)

    def _array(self, values: torch.Tensor) -> Float[np.ndarray, "layer head"]:
        return values[self._layers].double().numpy()

    @property
    def _layers(self) -> list[int]:
        return list(self.view.layers)

    @property
    def _heads(self) -> range:
        return range(self.view.scores.shape[1])

    def _each(self, text: "_OfHead") -> list[list[str]]:
        return [[text(layer, head) for head in self._heads] for layer in self._layers]

    # -- sentences ----------------------------------------------------------------------------------------------

    def types_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The claimed types of a head, the strongest first."""
        return () if self.types is None else self.types.types_of(layer, head)

    def _sentence(self, layer: int, head: int) -> str:
        kinds, name = self.types_of(layer, head), f"L{layer}H{head}"
        if kinds:
            return f"{name} gives {self._share(layer, head, kinds[0])}."
        return f"{name}: {'no type is claimed' if self.types is not None else 'types were not measured'}."

    def _share(self, layer: int, head: int, kind: str) -> str:
        """A head's attention on the targets of a claimed type, over the rows that have one."""
        score, baseline, low, high = (percent(number, 0) for number in self._claims[layer, head, kind])
        compared = "if uniform" if kind in POSITIONAL else "by distance alone"
        return (
            f"{score} of its attention to {_TARGETS.get(kind, f'the token {kind}')} "
            f"(95 % interval {low} to {high}; {compared}: {baseline})"
        )

    @cached_property
    def _claims(self) -> dict[tuple[int, int, str], tuple[float, float, float, float]]:
        """The score of each claim, its baseline, and the ends of its interval."""
        assert self.types is not None
        claims: Any = self.types.to_frame().itertuples()
        return {
            (claim.layer, claim.head, claim.type): (claim.score, claim.baseline, claim.score_low, claim.score_high)
            for claim in claims
        }

    def _type(self, layer: int, head: int) -> str:
        kinds = self.types_of(layer, head)
        if self.types is None:
            return ""
        if not kinds:
            return f"None is claimed. Highest scores: {self.types.top_scores(layer, head)}."
        return "\n".join(f"{kind}: {self._share(layer, head, kind)}" for kind in kinds)

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

    def _here(self, layer: int, head: int) -> str:
        """The keys that the head attends to most on this text, over its rows."""
        pattern = self.view.pattern[self._layers.index(layer), head]
        if len(pattern) < 2:
            return ""
        mass = pattern[1:].mean(axis=0)
        top = np.argsort(-mass, kind="stable")[:3]
        parts = [f"{percent(float(mass[key]), 0)} to {self.view.named_key(int(key))}" for key in top if mass[key] > 0]
        return f"Mean attention: {', '.join(parts)}."

    def _named_alike(self, alike: Float[np.ndarray, "head_of_all head_of_all"], layer: int, head: int) -> str:
        at = self._layers.index(layer) * len(self._heads) + head
        order = np.argsort(-alike[at], kind="stable")[:ALIKE]
        names = [divmod(int(other), len(self._heads)) for other in order if np.isfinite(alike[at, other])]
        return ", ".join(
            f"L{self._layers[row]}H{other} ({alike[at, row * len(self._heads) + other]:.2f})" for row, other in names
        )

    def _effect(self, layer: int, head: int) -> str:
        if self.effects is None or not bool(self.effects.effect[layer, head].isfinite()):
            return ""
        sentence = f"{self.effects.metric} {signed(float(self.effects.effect[layer, head]), '.3f')} nats"
        if self._effect_ends is not None:
            low, high = (signed(float(end[layer, head]), ".3f") for end in self._effect_ends)
            doubt = (
                "" if self.effects.clear_size[layer, head]
                else "; its sign is clear, its size is not" if self.effects.clear[layer, head] else "; not clear"
            )  # fmt: skip
            sentence += f" (95 % interval, corrected for all heads: {low} to {high}{doubt})"
        verdict = "" if self.null is None else self.null.verdict[layer][head]
        return f"{sentence}\nAttention to the first token: {verdict}" if verdict else sentence

    @cached_property
    def _effect_ends(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The intervals of all effects; None if there are too few texts."""
        assert self.effects is not None
        low, high = self.effects.simultaneous()
        return (low, high) if bool(low.isfinite().any()) else None

    # -- the top of the page ------------------------------------------------------------------------------------

    @property
    def _largest_effect(self) -> "Headline | None":
        """The largest effect whose size is clear."""
        if self.effects is None or self._effect_ends is None:
            return None
        size = self._array(self.effects.effect.abs() * self.effects.clear_size)
        row, head = np.unravel_index(np.nan_to_num(size).argmax(), size.shape)
        if not size[row, head] > 0:
            return None
        layer, place = self._layers[row], (self._layers[row], int(head))
        value = float(self.effects.effect[place])
        low, high = sorted(abs(float(end[place])) for end in self._effect_ends)
        kinds = self.types_of(*place)
        kind = f" (type {kinds[0]})" if kinds else ""
        swept = int(self.effects.swept.sum())
        return Headline(
            f"Zeroing L{layer}H{head}{kind} {'raises' if value > 0 else 'lowers'} the {self.effects.metric} by "
            f"{abs(value):.2f} nats (95 % interval, corrected for {swept} heads: {low:.2f} to {high:.2f}).",
            place,
        )

    @property
    def _clearest_type(self) -> "Headline | None":
        """The head that belongs most clearly to a type, preferably one that does not rest."""
        example = example_of(self.types, self.view.layers)
        if example is None:
            return None
        layer, head, kind = example
        return Headline(
            f"In repeated random text, L{layer}H{head} gives {self._share(layer, head, kind)}.", (layer, head)
        )

    @property
    def _most_focused(self) -> "Headline | None":
        """The head that attends most to one kind of key on this text, without a claim beyond it."""
        names = {
            "first_mass": self.nouns.first,
            "previous_mass": f"{self.nouns.token} before",
            "self_mass": f"{self.nouns.token} itself",
        }
        masses = {name: np.nan_to_num(self._array(getattr(self.focus, name))) for name in names}
        name = max(masses, key=lambda name: masses[name].max())
        row, head = np.unravel_index(masses[name].argmax(), masses[name].shape)
        if not masses[name][row, head] > 0:
            return None
        where, share = f"L{self._layers[row]}H{head}", percent(float(masses[name][row, head]), 0)
        sentence = f"On this {self.nouns.text}, {where} gives {share} of its attention to the {names[name]}."
        return Headline(sentence, (self._layers[row], int(head)))


_TARGETS: Final = {
    "previous": "the previous token",
    "next": "the next token",
    "self": "the token itself",
    "first": "the first token",
    "sentence end": "ends of sentences",
    "comma": "commas",
    "special": "special tokens",
    "duplicate": "earlier copies of the token",
    "induction": "the token after an earlier copy",
}
"""The targets of each type, in words; "3 back" is the token 3 back."""


def most_alike(pattern: Float[np.ndarray, "layer head query key"]) -> Float[np.ndarray, "head_of_all head_of_all"]:
    """The overlap of the attention of every two heads, mean over the rows with a choice: Σ_j √(p_ij q_ij), 0 to 1.

    A head's overlap with itself is NaN. Kailath 1967 (docs/formulas.md#similar-heads).

    >>> alike = most_alike(np.array([[[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]]]))
    >>> alike.round(3).tolist()
    [[nan, 0.707], [0.707, nan]]
    """
    layers, heads = pattern.shape[:2]
    choice = (pattern > 0).sum(axis=-1).max(axis=(0, 1)) > 1
    roots = torch.from_numpy(np.ascontiguousarray(pattern[:, :, choice])).clamp_min(0).sqrt()
    flat = roots.reshape(layers * heads, -1)
    overlap = (flat @ flat.T / max(1, int(choice.sum()))).double().numpy()
    np.fill_diagonal(overlap, np.nan)
    return overlap if choice.any() else np.full_like(overlap, np.nan)


def robust(numbers: Sequence[HeadNumber]) -> Float[torch.Tensor, "number layer head"]:
    """How far each number of a head is from the median of all heads, in robust standard deviations; 0 if undefined."""
    return torch.stack([robust_scores(torch.tensor(number.values)).abs().nan_to_num() for number in numbers])


def furthest(numbers: Sequence[HeadNumber]) -> list[list[str]]:
    """For each head, its numbers furthest from the median of all heads, by their robust scores."""
    layers, heads = numbers[0].values.shape
    values = [torch.tensor(number.values) for number in numbers]
    scores = robust(numbers)
    medians = [spread_of(value.flatten())[0] for value in values]

    def of_head(layer: int, head: int) -> str:
        order = scores[:, layer, head].argsort(descending=True, stable=True)[:FURTHEST].tolist()
        lines = (
            f"{numbers[at].label}: {float(values[at][layer, head]):.3g} (median {medians[at]:.3g})"
            for at in order
            if scores[at, layer, head] > 0
        )
        return with_minus_signs("\n".join(lines))

    return [[of_head(layer, head) for head in range(heads)] for layer in range(layers)]
