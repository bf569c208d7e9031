"""What a page about one text says about each head, besides what every page says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from ..draw.heads import HeadNumber
from ..draw.numbers import ScoreNumbers
from ..draw.text import percent
from ..methods.scores.decompose_scores import ScoreDecomposition
from .heads import HeadFacts, Headline, furthest


@dataclass(frozen=True, kw_only=True)
class TextHeads(HeadFacts):
    """The results from which a page about one text describes its heads."""

    view: ScoreNumbers
    scores: ScoreDecomposition

    def _card(self) -> Mapping[str, Sequence[Sequence[str]]]:
        return {
            "Type": self.each(self._type),
            "Clearest example": self.each(self._example),
            f"On this {self.nouns.text}": self.each(self._here),
            "Furthest from the median head": furthest(self.compared) or self.each(lambda layer, head: ""),
            "Heads that attend alike": self._named_alike(most_alike(self.view.pattern)),
            "Without it": self.each(self._effect),
        }

    @property
    def further_numbers(self) -> list[HeadNumber]:
        """The terms' shares of the highest scores."""
        return self.scores.head_numbers(self.view)

    def _here(self, layer: int, head: int) -> str:
        """The keys that the head attends to most on this text, over its rows."""
        pattern = self.view.pattern[self.layers.index(layer), head]
        if len(pattern) < 2:
            return ""
        mass = pattern[1:].mean(axis=0)
        top = np.argsort(-mass, kind="stable")[:3]
        parts = [f"{percent(float(mass[key]), 0)} to {self.view.named_key(int(key))}" for key in top if mass[key] > 0]
        return f"Mean attention: {', '.join(parts)}."

    @property
    def further_headlines(self) -> list[Headline]:
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
            return []
        where, share = f"L{self.layers[row]}H{head}", percent(float(masses[name][row, head]), 0)
        sentence = f"On this {self.nouns.text}, {where} gives {share} of its attention to the {names[name]}."
        return [Headline(sentence, (self.layers[row], int(head)))]


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
