"""What can be said about a mean over few texts, and about the largest of many means (formulas §7)?

Pointwise intervals are t intervals over texts; simultaneous ones hold for all quantities together, by the bootstrap of
the largest studentised deviation (max-T: Romano & Wolf 2005; Chernozhukov et al. 2013).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Philox
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ..arguments import finite_number

LEVEL: Final = 0.95
LEAST_TEXTS: Final = 5
"""The fewest texts that give an interval."""
REPLICATES: Final = 2000
"""Bootstrap replicates behind a simultaneous interval."""

_NUMBERS_AT_ONCE: Final = 2**22
"""Roughly how many weights of texts are held at once."""
_QUANTITIES_AT_ONCE: Final = 1024
"""Of how many quantities the replicates are held at once."""
_NO_SPREAD: Final = 1e-12
"""Deviations below this share of the mean are rounding."""
_RARE: Final = 1e-3
"""Replicates that occur less often do not matter."""

Interval = tuple[Tensor, Tensor]
"""Low and high end."""


@dataclass(frozen=True, eq=False)
class TextMeans:
    """Means R = Σ_t y_t / Σ_t n_t of many quantities over the same texts, with their intervals.

    y_t is a text's sum, and n_t its size, such as its number of rows: a mean of one value per text has n_t = 1. A text
    for which both are 0 does not count for that quantity.

    >>> found = TextMeans.of_values(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 1.0, -1.0, 0.5, 0.0, -0.5]]))
    >>> found.mean.tolist(), [[round(each, 3) for each in end.tolist()] for end in found.interval()]
    ([3.5, 0.0], [[1.537, -0.742], [5.463, 0.742]])
    >>> found.clear.tolist()
    [True, False]
    """

    above: Float[Tensor, "*place text"]
    below: Float[Tensor, "*place text"]

    @classmethod
    def of_values(cls, values: Float[Tensor, "*place text"]) -> Self:
        """Means of one value per text; NaN where a text has none."""
        return cls.of_ratio(values, torch.ones_like(values))

    @classmethod
    def of_ratio(cls, above: Float[Tensor, "*place text"], below: Float[Tensor, "*#place text"]) -> Self:
        """Σ above / Σ below; a text counts where both are numbers."""
        below = below.double().expand_as(above)
        above = above.double()
        there = ~(above.isnan() | below.isnan())
        return cls(above.where(there, 0.0), below.where(there, 0.0))

    @cached_property
    def mean(self) -> Float[Tensor, "*place"]:
        """R; NaN if no text counts."""
        return self.above.sum(dim=-1) / self.below.sum(dim=-1)

    @cached_property
    def _there(self) -> Bool[Tensor, "*place text"]:
        """Whether a text counts for a quantity."""
        return (self.below != 0) | (self.above != 0)

    @cached_property
    def texts(self) -> Int[Tensor, "*place"]:
        """The number of texts behind each mean."""
        return self._there.sum(dim=-1)

    @cached_property
    def _deviations(self) -> Float[Tensor, "*place text"]:
        """y_t − R n_t: what each text adds to the deviation of R, times Σ n_t."""
        return self.above - self.mean[..., None].nan_to_num(0.0) * self.below

    @cached_property
    def _left_out(self) -> Float[Tensor, "*place text"]:
        """(y_t − R n_t) / (Σ n − n_t): how much R falls when a text is left out."""
        others = self.below.sum(dim=-1, keepdim=True) - self.below
        return torch.where(self._there, self._deviations / others, 0.0)

    def at(self, rows: Sequence[int]) -> Self:
        """The means of some rows of the first axis."""
        return type(self)(self.above[list(rows)], self.below[list(rows)])

    @cached_property
    def effective_texts(self) -> Float[Tensor, "*place"]:
        """(Σ n_t)² / Σ n_t²: the number of equally long texts that would weigh the same (Kish 1965)."""
        return self.below.sum(dim=-1) ** 2 / (self.below**2).sum(dim=-1)

    @cached_property
    def standard_error(self) -> Float[Tensor, "*place"]:
        """By the jackknife of the linearised ratio; for equally long texts, the standard deviation over √texts.

        √((n − 1)/n · Σ_t ((y_t − R n_t) / (Σn − n_t))²). NaN for fewer than two texts.
        """
        squares = (self._left_out**2).sum(dim=-1) * (self.texts - 1) / self.texts
        return squares.sqrt().masked_fill(self.texts < 2, torch.nan)

    @cached_property
    def varies(self) -> Bool[Tensor, "*place"]:
        """Whether the texts differ at all, for each quantity."""
        return self.standard_error > _NO_SPREAD * self.mean.abs()

    def interval(self, level: float = LEVEL) -> Interval:
        """Low and high end of the pointwise t interval of each mean; NaN under five texts.

        R ± t_df · standard error, with df = (effective number of texts) − 1.
        """
        half = self._half(checked_level(level)).masked_fill(self.texts < LEAST_TEXTS, torch.nan)
        return self.mean - half, self.mean + half

    def _half(self, level: float) -> Float[Tensor, "*place"]:
        freedom = (self.effective_texts - 1).clamp_min(1.0).nan_to_num(1.0)
        return torch.from_numpy(np.asarray(student_t.ppf((1 + level) / 2, freedom.numpy()))) * self.standard_error

    def simultaneous(self, level: float = LEVEL) -> Interval:
        """Low and high end of intervals that hold for all quantities together, so also for one picked among them.

        R ± c · standard error, where max |R* − R| / SE* exceeds c in 1 − `level` of the replicates, each of which draws
        as many texts again. A quantity that is the same on nearly all texts (`tied`) has replicates without spread; it
        is treated apart, with a t interval at (1 − level) / quantities. For one that is the same on all n texts, only
        the sign is known: it has an interval if chance gives the same sign to n texts less often than that.
        """
        low, high = self.interval(level)
        several = (self.texts >= LEAST_TEXTS).sum()
        each = (1 - level) / several.clamp_min(1).double()
        apart = self.tied & (self.texts >= LEAST_TEXTS)
        place = math.ceil((1 - (1 - level) * (1 - float(apart.sum()) / max(int(several), 1))) * (REPLICATES + 1)) - 1
        half = (self._largest[place] if place < REPLICATES else torch.inf) * self._linear_error
        half = torch.where(apart, self._half(1 - float(each)), half)
        # At least as wide as the pointwise interval, which may be wider if texts differ in length.
        half = torch.maximum(half, (high - low) / 2)
        certain = 2.0 ** (1 - self.texts.double()) <= each
        half = torch.where(self.varies, half, torch.where(certain, 0.0, torch.nan))
        half = half.masked_fill(self.texts < LEAST_TEXTS, torch.nan)
        return self.mean - half, self.mean + half

    @cached_property
    def tied(self) -> Bool[Tensor, "*place"]:
        """Whether a quantity is the same on so many texts that replicates of only these are not rare."""
        ratio = torch.where(self.below != 0, self.above / self.below, torch.nan)
        size = ratio.abs().nan_to_num(0.0).amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        ordered = (ratio / size).sort(dim=-1).values
        new = torch.ones_like(ordered, dtype=torch.long)
        new[..., 1:] = (ordered[..., 1:] - ordered[..., :-1]).abs() > _NO_SPREAD
        run = torch.zeros_like(new).scatter_add(-1, new.cumsum(dim=-1) - 1, (~ordered.isnan()).long())
        alike = run.amax(dim=-1)
        return (alike > 1) & ((alike / self.texts).double() ** self.texts > _RARE)

    @cached_property
    def _linear_error(self) -> Float[Tensor, "*place"]:
        """The standard error of the linearised ratio, ignoring how much each text weighs."""
        squares = (self._deviations**2).sum(dim=-1) * self.texts / (self.texts - 1)
        return squares.sqrt() / self.below.sum(dim=-1).abs()

    @cached_property
    def _largest(self) -> Float[Tensor, " replicate"]:
        """max |R* − R| / SE* over the quantities, for each replicate, sorted; NaN if none has an interval."""
        known = self.varies & ~self.tied & (self.texts >= LEAST_TEXTS)
        if not known.any():
            return torch.full((REPLICATES,), torch.nan, dtype=torch.float64)
        deviations, below = self._deviations[known], self.below[known]
        texts, alike = deviations.shape[-1], bool((below == 1).all())
        at_once = max(1, _NUMBERS_AT_ONCE // texts)
        largest = []
        for start in range(0, REPLICATES, at_once):
            drawn = resampled(texts, min(REPLICATES - start, at_once), seed=start)
            parts = [
                _studentised(deviations[some], None if alike else below[some], drawn).amax(dim=0)
                for some in torch.split(torch.arange(len(deviations)), _QUANTITIES_AT_ONCE)
            ]
            largest.append(torch.stack(parts).amax(dim=0))
        return torch.cat(largest).sort().values

    @cached_property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether a mean differs from 0 among all of these: its simultaneous 95 % interval excludes 0."""
        low, high = self.simultaneous()
        return (low > 0) | (high < 0)

    @cached_property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ|y_t|: intervals undercover means that rest on few texts."""
        size = self.above.abs()
        return (self.texts > 1) & (size.amax(dim=-1) > size.sum(dim=-1) / 2)

    def texts_needed(self, at: tuple[int, ...]) -> int | None:
        """Roughly how many texts would make an effect of this size and spread clear in half of all cases.

        The least n with |R| ≥ t · SD / √n, t of (1 − 0.05 / 2m) with 0.632 n − 1 degrees of freedom: what max-T
        requires of m normal effects, as resampled texts repeat. None if that is unknown.
        """
        size, error = float(self.mean[at].abs()), float(self.standard_error[at])
        if not (size > 0 and error > 0):
            return None
        spread, count = error * float(self.texts[at]) ** 0.5, int((self.texts >= 2).sum())
        numbers = np.unique(np.geomspace(LEAST_TEXTS, 1e6, 400).astype(int))
        needed = student_t.ppf(1 - (1 - LEVEL) / 2 / count, 0.632 * numbers - 1) * spread / np.sqrt(numbers)
        enough = numbers[needed <= size]
        return int(enough[0]) if len(enough) else None


def checked_level(level: Any) -> float:
    """The nominal coverage of an interval."""
    return finite_number("level", level, above=0.0, below=1.0)


def difference(one: TextMeans, other: TextMeans) -> TextMeans:
    """The difference D of two means over the same texts.

    If both have the same number of rows, Σ (y_t − y'_t) / Σ n_t. Else a mean of one value per text, the jackknife's
    pseudo-values D + (n − 1) · (e_t / (Σn − n_t) − e'_t / (Σn' − n'_t)), shifted so that their mean is D.
    """
    if torch.equal(one.below, other.below):
        return TextMeans(one.above - other.above, one.below)
    moved = one._left_out - other._left_out
    there = one._there | other._there
    texts = there.sum(dim=-1, keepdim=True)
    moved = moved - moved.sum(dim=-1, keepdim=True) / texts
    values = (one.mean - other.mean)[..., None] + (texts - 1) * moved
    return TextMeans.of_values(values.masked_fill(~there, torch.nan))


def _studentised(
    deviations: Float[Tensor, "quantity text"],
    below: Float[Tensor, "quantity text"] | None,
    drawn: Float[Tensor, "text replicate"],
) -> Float[Tensor, "quantity replicate"]:
    """|R* − R| / SE* of every quantity in every replicate; infinite if its texts do not differ."""
    sums, squares = deviations @ drawn, deviations**2 @ drawn
    if below is None:
        total = texts = torch.full((1, 1), float(len(drawn)), dtype=torch.float64)
        moved = sums / total
        squares = squares - total * moved**2
    else:
        total, texts = below @ drawn, ((below != 0) | (deviations != 0)).double() @ drawn
        moved = sums / total
        squares = squares - 2 * moved * ((deviations * below) @ drawn) + moved**2 * (below**2 @ drawn)
    error = (squares.clamp_min(0.0) * texts / (texts - 1)).sqrt() / total.abs()
    # In a replicate of a single text, drawn again and again, the squares are only rounding.
    nothing = error <= 1e-7 * (deviations**2).mean(dim=-1, keepdim=True).sqrt() * texts / total.abs()
    return torch.where(nothing | ~torch.isfinite(error), torch.inf, (moved / error).abs())


def resampled(texts: int, replicates: int, seed: int = 0) -> Float[Tensor, "text replicate"]:
    """How often each text is drawn in each replicate, which draws as many texts as there are, with replacement.

    The bits are Philox-4×64's (Salmon et al. 2011), so every version of numpy draws the same.

    >>> resampled(4, 3).sum(dim=0).tolist()
    [4.0, 4.0, 4.0]
    """
    raw = Philox(key=[seed, texts]).random_raw(replicates * texts) >> np.uint64(11)
    drawn = (raw * 2.0**-53 * texts).astype(np.int64).reshape(replicates, texts)
    places = drawn + np.arange(replicates)[:, None] * texts
    counts = np.bincount(places.ravel(), minlength=replicates * texts)
    return torch.from_numpy(counts.reshape(replicates, texts).T.astype(np.float64))
