"""What a page about one text says about each head, besides what every page says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float

from ..basics.messages import capitalised
from ..draw.heads import HeadNumber
from ..draw.numbers import ScoreNumbers
from ..draw.text import percent
from ..methods.scores.decompose_scores import ScoreDecomposition
from .heads import HeadFacts, Headline, furthest
from .start import TellingRows


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
        return self.scores.head_numbers(self.view)

    def _here(self, layer: int, head: int) -> str:
        """The head's most telling row, and the keys that it attends to most over all rows."""
        place = self.layers.index(layer)
        pattern, row = self.view.pattern[place, head], self.rows.of_head(place, head)
        if len(pattern) < 2:
            return ""
        mass = pattern[1:].mean(axis=0)
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
        sentence = f"On this {self.nouns.text}, L{self.layers[place]}H{head} attends {row.sentence}."
        return Headline(sentence, (self.layers[place], head))


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
