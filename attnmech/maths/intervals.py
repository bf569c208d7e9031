"""Tests and intervals for means over few texts, and for the largest of many means (docs/formulas.md#intervals).

The direction of an effect is judged by the sign test over texts, corrected for all quantities. Its size is judged by
pointwise t intervals over texts, and by simultaneous intervals that hold for all quantities together, from the
bootstrap of the largest studentised deviation (max-T: Romano & Wolf 2005; Chernozhukov et al. 2013). A few heavy-tailed
quantities do not widen the intervals of the others.
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
from scipy.stats import beta, binom  # type: ignore[import-untyped]
from scipy.stats import t as student_t
from torch import Tensor

from ..basics.arguments import finite_number
from .copies import over_copies

LEVEL: Final = 0.95
LEAST_TEXTS: Final = 5  # the fewest texts that give an interval
REPLICATES: Final = 2000  # the number of bootstrap replicates for a simultaneous interval

HEAVY_SHARE: Final = 16  # one quantity in this many is in the heavy group, whose variances rest on the fewest texts

_NUMBERS_AT_ONCE: Final = 2**22  # the approximate number of text weights in memory at once
_QUANTITIES_AT_ONCE: Final = 1024  # the number of quantities with replicates in memory at once
_NO_SPREAD: Final = 1e-12  # deviations below this share of the mean are attributed to rounding
_RARE: Final = 1e-3  # replicates that occur less often do not matter

Interval = tuple[Tensor, Tensor]  # the low and the high end


@dataclass(frozen=True, eq=False)
class TextMeans:
    """Means R = Σ_t y_t / Σ_t n_t of many quantities over the same texts, with their intervals.

    y_t is a text's sum, and n_t its size, such as its number of rows: a mean of one value per text has n_t = 1. A text
    for which both are 0 does not count for that quantity. Copies of a text are one text, with their sums: they weigh in
    the mean as often as they occur, but they are no further evidence. `copies` is as `copies_of` returns it.

    >>> values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.0, 1.0, -1.0, 0.5, 0.0, -0.5, 0.0]])
    >>> means = TextMeans.of_values(values)
    >>> means.mean.tolist(), [[round(end, 3) for end in ends.tolist()] for ends in means.interval()]
    ([4.0, 0.0], [[2.002, -0.597], [5.998, 0.597]])
    >>> means.agreeing.tolist(), means.clear.tolist(), means.clear_size.tolist()
    ([7, 0], [True, False], [True, False])
    """

    above: Float[Tensor, "*place text"]
    below: Float[Tensor, "*place text"]

    @classmethod
    def of_values(cls, values: Float[Tensor, "*place text"], copies: Sequence[int] = ()) -> Self:
        """Takes means of one value per text; NaN where a text has no value."""
        return cls.of_ratio(values, torch.ones_like(values), copies)

    @classmethod
    def of_ratio(
        cls, above: Float[Tensor, "*place text"], below: Float[Tensor, "*#place text"], copies: Sequence[int] = ()
    ) -> Self:
        """Takes Σ above / Σ below; a text counts if both are numbers."""
        below = below.double().expand_as(above)
        above = above.double()
        there = ~(above.isnan() | below.isnan())
        return cls(above.where(there, 0.0), below.where(there, 0.0)).merged(copies)

    def merged(self, copies: Sequence[int]) -> Self:
        """The same means, with the copies of each text as one text."""
        return type(self)(over_copies(self.above, copies), over_copies(self.below, copies)) if copies else self

    @cached_property
    def mean(self) -> Float[Tensor, "*place"]:
        """R; NaN if no text counts."""
        return self.above.sum(dim=-1) / self.below.sum(dim=-1)

    @property
    def per_text(self) -> Float[Tensor, "*place text"]:
        """y_t / n_t, the value on each text; NaN for texts that do not count."""
        return torch.where(self._there, self.above / self.below, torch.nan)

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
        """The jackknife of the linearised ratio; for equally long texts, the standard deviation / √texts.

        √((n − 1)/n · Σ_t ((y_t − R n_t) / (Σn − n_t))²). NaN for fewer than two texts.
        """
        squares = (self._left_out**2).sum(dim=-1) * (self.texts - 1) / self.texts
        return squares.sqrt().masked_fill(self.texts < 2, torch.nan)

    @cached_property
    def varies(self) -> Bool[Tensor, "*place"]:
        """Whether the texts differ at all, for each quantity."""
        return self.standard_error > _NO_SPREAD * self.mean.abs()

    def interval(self, level: float = LEVEL) -> Interval:
        """Returns the low and high ends of the pointwise t interval of each mean; NaN for fewer than five texts.

        R ± t_df · standard error, with df = (effective number of texts) − 1.
        """
        half = self._half(checked_level(level)).masked_fill(self.texts < LEAST_TEXTS, torch.nan)
        return self.mean - half, self.mean + half

    def _half(self, level: float) -> Float[Tensor, "*place"]:
        freedom = (self.effective_texts - 1).clamp_min(1.0).nan_to_num(1.0)
        return torch.from_numpy(np.asarray(student_t.ppf((1 + level) / 2, freedom.numpy()))) * self.standard_error

    def simultaneous(self, level: float = LEVEL) -> Interval:
        """Returns the low and high ends of intervals that hold for all quantities together, and therefore for the
        largest.

        R ± c · standard error, where max |R* − R| / SE* over a group of quantities exceeds c in a share
        (1 − `level`) · (size of the group) / (all quantities) of the replicates. Each replicate draws the same number
        of texts. The `heavy` quantities form a separate group, so that they do not widen the intervals of the rest.
        A quantity that is the same on nearly all texts (`tied`) has replicates without spread; it gets a t interval at
        (1 − level) / quantities instead. For a quantity that is the same on all n texts, only the sign is known: it has
        an interval if chance gives n texts the same sign less often than that.
        """
        low, high = self.interval(level)
        several = (self.texts >= LEAST_TEXTS).sum().clamp_min(1).double()
        error = (1 - level) / several
        apart = self.tied & (self.texts >= LEAST_TEXTS)
        squares = (self._deviations**2).sum(dim=-1) * self.texts / (self.texts - 1)
        linear_error = squares.sqrt() / self.below.sum(dim=-1).abs()  # without the weights of the texts
        half = torch.full_like(self.mean, torch.inf)
        for group, largest in zip((self._regular, self.heavy), self._largest, strict=True):
            place = math.ceil((1 - float(error * group.sum())) * (REPLICATES + 1)) - 1
            bound = largest[place] if place < REPLICATES else torch.inf
            half = torch.where(group, bound * linear_error, half)
        half = torch.where(apart, self._half(1 - float(error)), half)
        # The pointwise interval may be wider if texts differ in length; take the wider one.
        half = torch.maximum(half, (high - low) / 2)
        certain = 2.0 ** (1 - self.texts.double()) <= error
        half = torch.where(self.varies, half, torch.where(certain, 0.0, torch.nan))
        half = half.masked_fill(self.texts < LEAST_TEXTS, torch.nan)
        return self.mean - half, self.mean + half

    @cached_property
    def heavy(self) -> Bool[Tensor, "*place"]:
        """The quantities whose variance rests on the fewest texts: one in `HEAVY_SHARE`, but at least one if there are
        several.

        They have the largest Σ_t d_t⁴ / (Σ_t d_t²)², with d_t the deviation of a text: 1 where a single text makes up
        all of the variance. Their number is fixed, so that an ordinary quantity is not judged by its own sample alone.
        """
        known = self.varies & ~self.tied & (self.texts >= LEAST_TEXTS)
        squares = self._deviations**2
        share = (squares**2).sum(dim=-1) / squares.sum(dim=-1) ** 2
        count = int(known.sum())
        places = share.masked_fill(~known, -1.0).flatten().topk(math.ceil(count / HEAVY_SHARE) if count > 1 else 0)
        heavy = torch.zeros_like(known.flatten())
        heavy[places.indices] = True
        return heavy.view_as(known)

    @property
    def _regular(self) -> Bool[Tensor, "*place"]:
        """The quantities that are neither `heavy` nor `tied` and have an interval."""
        return self.varies & ~self.tied & ~self.heavy & (self.texts >= LEAST_TEXTS)

    @cached_property
    def tied(self) -> Bool[Tensor, "*place"]:
        """Whether so many texts share one value of a quantity that replicates of only these texts are not rare."""
        ratio = torch.where(self.below != 0, self.above / self.below, torch.nan)
        size = ratio.abs().nan_to_num(0.0).amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        ordered = (ratio / size).sort(dim=-1).values
        new = torch.ones_like(ordered, dtype=torch.long)
        new[..., 1:] = (ordered[..., 1:] - ordered[..., :-1]).abs() > _NO_SPREAD
        alike = torch.zeros_like(new).scatter_add(-1, new.cumsum(dim=-1) - 1, (~ordered.isnan()).long()).amax(dim=-1)
        return (alike > 1) & ((alike / self.texts).double() ** self.texts > _RARE)

    @cached_property
    def _largest(self) -> tuple[Float[Tensor, " replicate"], Float[Tensor, " replicate"]]:
        """max |R* − R| / SE* over the regular and the heavy quantities, for each replicate, sorted; NaN without any."""
        return self._largest_among(self._regular), self._largest_among(self.heavy)

    def _largest_among(self, group: Bool[Tensor, "*place"]) -> Float[Tensor, " replicate"]:
        if not group.any():
            return torch.full((REPLICATES,), torch.nan, dtype=torch.float64)
        deviations, below = self._deviations[group][:, self._order], self.below[group][:, self._order]
        texts = deviations.shape[-1]
        at_once = max(1, _NUMBERS_AT_ONCE // texts)
        largest = []
        for start in range(0, REPLICATES, at_once):
            drawn = resampled(texts, min(REPLICATES - start, at_once), seed=start)
            parts = [
                _studentised(deviations[some], below[some], drawn).amax(dim=0)
                for some in torch.split(torch.arange(len(deviations)), _QUANTITIES_AT_ONCE)
            ]
            largest.append(torch.stack(parts).amax(dim=0))
        return torch.cat(largest).sort().values

    @cached_property
    def _order(self) -> Int[Tensor, " text"]:
        """An order of the texts that depends only on their values, so that draws do not depend on that of inputs."""
        values = torch.cat([parts.reshape(-1, parts.shape[-1]) for parts in (self.above, self.below)])
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
        return (weights[:, None] * values).sum(dim=0).argsort(stable=True)

    @cached_property
    def _signs(self) -> tuple[Int[Tensor, "*place"], Int[Tensor, "*place"]]:
        """The number of texts on which a quantity is above 0, and below 0."""
        return (self.above > 0).sum(dim=-1), (self.above < 0).sum(dim=-1)

    @cached_property
    def agreeing(self) -> Int[Tensor, "*place"]:
        """The number of texts on which a quantity has the sign of its mean; 0 if the mean is 0."""
        above, below = self._signs
        return torch.where(self.mean > 0, above, torch.where(self.mean < 0, below, 0))

    @property
    def ties(self) -> Int[Tensor, "*place"]:
        """The number of texts on which a quantity is 0."""
        above, below = self._signs
        return self.texts - above - below

    @cached_property
    def direction(self) -> Int[Tensor, "*place"]:
        """+1 or −1 if a quantity has that sign on more texts than chance allows; otherwise 0.

        An exact two-sided sign test, valid for any distribution with median 0: P = 2 · P[B ≤ min(n₊, n₋)], with B
        binomial in n₊ + n₋ and ½; texts with the value 0 do not count. The level is 1 − `LEVEL` over all quantities, by
        Holm's procedure (1979). 0 for fewer than five texts.
        """
        above, below = self._signs
        measured = self.texts >= LEAST_TEXTS
        rejected = holm(sign_test(above, below)[measured])
        sign = torch.zeros_like(above)
        sign[measured] = torch.where(rejected, (above - below)[measured].sign(), 0)
        return sign

    @cached_property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether the `direction` of a quantity is clear among all quantities, and its mean has the same sign."""
        return (self.direction != 0) & (self.direction == self.mean.sign())

    @cached_property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """Whether the simultaneous 95 % interval excludes 0, and no single text carries the mean (`one_text`)."""
        low, high = self.simultaneous()
        return ((low > 0) | (high < 0)) & ~self.one_text

    @cached_property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ|y_t|; intervals of such means are too narrow."""
        size = self.above.abs()
        return (self.texts > 1) & (size.amax(dim=-1) > size.sum(dim=-1) / 2)

    def texts_needed(self, at: tuple[int, ...]) -> int | None:
        """Estimates how many texts would make an effect clear, if its sign stays as consistent as on these texts.

        The least n at which the sign test gives P ≤ 0.05 / quantities, with the same share of texts as here having the
        sign of the mean. None if no more than half of the texts have that sign.
        """
        above, below = (int(count[at]) for count in self._signs)
        counted, agreeing = above + below, int(self.agreeing[at])
        if 2 * agreeing <= counted:
            return None
        numbers = torch.from_numpy(np.unique(np.geomspace(LEAST_TEXTS, 1e6, 2000).astype(int)))
        same = (numbers * (agreeing / counted)).round().long()
        quantities = int((self.texts >= 2).sum())
        enough = numbers[sign_test(same, numbers - same) <= (1 - LEVEL) / quantities]
        return int(enough[0]) if len(enough) else None


def sign_test(above: Int[Tensor, "*place"], below: Int[Tensor, "*place"]) -> Float[Tensor, "*place"]:
    """Returns the two-sided P of the exact sign test: 2 · P[B ≤ min(above, below)], B binomial in above + below and ½.

    >>> sign_test(torch.tensor([10, 6, 0]), torch.tensor([0, 4, 0])).tolist()
    [0.001953125, 0.75390625, 1.0]
    """
    one_sided = binom.cdf(torch.minimum(above, below).numpy(), (above + below).numpy(), 0.5)
    return torch.as_tensor(np.minimum(1.0, 2 * np.asarray(one_sided, dtype=np.float64)))


def fewest_texts(quantities: int) -> int:
    """Returns the fewest texts n on which one of the quantities can have a clear sign: 2^(1 − n) ≤ 0.05 / quantities.

    >>> fewest_texts(1), fewest_texts(32), fewest_texts(1024)
    (6, 11, 16)
    """
    return math.ceil(1 + math.log2(max(quantities, 1) / (1 - LEVEL)))


def holm(p: Float[Tensor, " test"], level: float = LEVEL) -> Bool[Tensor, " test"]:
    """Selects the tests that reject together, with a false rejection in at most 1 − `level` of cases (Holm 1979).

    The test with the k-th smallest of m values of P (k from 0) rejects if P is at most (1 − level) / (m − k) and all
    tests with smaller P reject.

    >>> holm(torch.tensor([0.02, 0.01, 0.04])).tolist(), holm(torch.tensor([0.03, 0.01, 0.04])).tolist()
    ([True, True, True], [False, True, False])
    """
    ordered, order = p.sort()
    within = ordered <= (1 - level) / (len(p) - torch.arange(len(p)))
    return torch.zeros_like(within).scatter(0, order, within.cummin(dim=0).values)


def checked_level(level: Any) -> float:
    """Checks the nominal coverage of an interval."""
    return finite_number("level", level, above=0.0, below=1.0)


def difference(one: TextMeans, other: TextMeans) -> TextMeans:
    """Returns the difference D of two means over the same texts.

    If both have the same number of rows, it is Σ (y_t − y'_t) / Σ n_t. Otherwise it is a mean of one value per text,
    the jackknife's pseudo-values D + (n − 1) · (e_t / (Σn − n_t) − e'_t / (Σn' − n'_t)), shifted to the mean D.
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
    below: Float[Tensor, "quantity text"],
    drawn: Float[Tensor, "text replicate"],
) -> Float[Tensor, "quantity replicate"]:
    """Computes |R* − R| / SE* of every quantity in every replicate; infinite if its texts do not differ."""
    sums, squares = deviations @ drawn, deviations**2 @ drawn
    total, texts = below @ drawn, ((below != 0) | (deviations != 0)).double() @ drawn
    moved = sums / total
    squares = squares - 2 * moved * ((deviations * below) @ drawn) + moved**2 * (below**2 @ drawn)
    error = (squares.clamp_min(0.0) * texts / (texts - 1)).sqrt() / total.abs()
    # If a replicate draws the same text every time, the squares are only rounding.
    nothing = error <= 1e-7 * (deviations**2).mean(dim=-1, keepdim=True).sqrt() * texts / total.abs()
    return torch.where(nothing | ~torch.isfinite(error), torch.inf, (moved / error).abs())


def resampled(texts: int, replicates: int, seed: int = 0) -> Float[Tensor, "text replicate"]:
    """Returns the number of times that each replicate draws each text, in `texts` draws with replacement.

    The random bits come from Philox-4×64 (Salmon et al. 2011), so every version of numpy makes the same draws.

    >>> resampled(4, 3).sum(dim=0).tolist()
    [4.0, 4.0, 4.0]
    """
    raw = Philox(key=[seed, texts]).random_raw(replicates * texts) >> np.uint64(11)
    drawn = (raw * 2.0**-53 * texts).astype(np.int64).reshape(replicates, texts)
    places = drawn + np.arange(replicates)[:, None] * texts
    counts = np.bincount(places.ravel(), minlength=replicates * texts)
    return torch.from_numpy(counts.reshape(replicates, texts).T.astype(np.float64))


def exact_interval(share: Tensor, tokens: int, error: float) -> tuple[Tensor, Tensor]:
    """Returns the exact interval (Clopper & Pearson 1934) for a share of independent tokens.

    A share that is not a whole number of tokens is rounded down for the low end, and up for the high end.

    >>> [round(float(end), 4) for end in exact_interval(torch.tensor(0.5), 10, 0.05)]
    [0.1871, 0.8129]
    """
    hits = share.double().numpy() * tokens
    fewest, most = torch.tensor(hits + 1e-9).floor().numpy(), torch.tensor(hits - 1e-9).ceil().numpy()
    low = torch.as_tensor(beta.ppf(error / 2, fewest, tokens - fewest + 1)).nan_to_num(0.0)
    return low, torch.as_tensor(beta.ppf(1 - error / 2, most + 1, tokens - most)).nan_to_num(1.0)
