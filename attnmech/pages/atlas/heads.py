"""What the atlas says about each head, besides what every page says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...draw.heads import HeadNumber
from ...draw.style import term_style
from ...draw.text import percent, visible_token
from ...methods.examples.result import HeadExamples
from ...methods.scores.composition import Composition
from ...methods.scores.variance_shares import VarianceShares
from ..heads import LOOKS, WHY, HeadFacts, furthest

EARLIER: Final = 3
"""The number of earlier heads on a card."""

CLEAR: Final = 0.1
"""A token counts as attended to in a row if it receives at least this share of its attention."""


@dataclass(frozen=True, kw_only=True)
class CorpusHeads(HeadFacts):
    """The results from which the atlas describes its heads."""

    examples: HeadExamples
    overlap: Float[Tensor, "head_of_all head_of_all"]
    shares: VarianceShares | None
    composition: Composition | None

    def _card(self) -> Mapping[str, Sequence[Sequence[str]]]:
        return {
            "Type": self.each(self._type),
            "In its strongest rows": self.each(self._strongest),
            "Furthest from the median head": furthest(self.compared),
            "Heads that attend alike": self._named_alike(self.overlap.numpy()),
            "Reads most from": self.each(self._earlier),
            "Without it": self.each(self._effect),
        }

    @property
    def further_numbers(self) -> list[HeadNumber]:
        """The share of rows like the strongest, and the terms' shares of the variance of scores."""
        own = torch.full((self.count_layers, self.count), torch.nan, dtype=torch.float64)
        own[list(self.layers)] = self.examples.share.double()
        numbers = [HeadNumber("rows_like", "share of rows like the strongest", LOOKS, self._array(own))]
        if self.shares is not None:
            numbers += [
                HeadNumber(
                    f"variance_{name}",
                    f"{term_style(name).label}, share of the scores' variance",
                    WHY,
                    self._array(self.shares.mean(name)),
                )
                for name in self.shares.terms
            ]
        return numbers

    @property
    def count_layers(self) -> int:
        """The number of the model's layers."""
        return self.focus.n_layers

    @cached_property
    def attended(self) -> list[list[dict[str, int]]]:
        """In how many of its strongest rows each head gives each token a clear share of its attention."""
        return self.each(self._attended)

    def _attended(self, layer: int, head: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self.examples.examples_of(layer, head):
            clear = {
                visible_token(text).strip("·").lower()
                for text, weight in zip(row.key_tokens, row.key_weights, strict=True)
                if weight >= CLEAR
            }
            for text in clear:
                counts[text] = counts.get(text, 0) + 1
        return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))

    def _strongest(self, layer: int, head: int) -> str:
        """The tokens of the strongest rows, and how typical such rows are."""
        counts = list(self.attended[self.layers.index(layer)][head].items())[:3]
        if not counts:
            return ""
        rows = len(self.examples.examples_of(layer, head))
        listed = ", ".join(f"“{text}” in {count}" for text, count in counts)
        share = float(self.examples.share[self.layers.index(layer), head])
        return (
            f"Attends to {listed} of {rows}.\n"
            f"Rows at least as strong as these are {percent(share, 1)} of all rows of the head."
        )

    def _earlier(self, layer: int, head: int) -> str:
        """The earlier heads whose output the head reads most, by the composition of weights."""
        if self.composition is None:
            return ""
        lines = []
        for name in ("q", "k", "v"):
            scores = getattr(self.composition, name)[:, :, layer, head].numpy() / self.composition.baseline
            if not np.isfinite(scores).any():
                continue
            order = np.argsort(-np.nan_to_num(scores, nan=-1.0).ravel(), kind="stable")[:EARLIER]
            places = [divmod(int(place), scores.shape[1]) for place in order if np.isfinite(scores.ravel()[place])]
            heads = ", ".join(f"L{one}H{other} ({scores[one, other]:.1f})" for one, other in places)
            lines.append(f"{name.upper()}: {heads}")
        return "\n".join([*lines, "Composition of weights; 1 is chance."]) if lines else ""
