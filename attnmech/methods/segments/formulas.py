"""Formulas of attention between segments (docs/formulas.md#segments).

    M_st = mean over the rows i of segment s of Σ_{j∈t} p_ij

The baseline by distance in tokens is M of a pattern that depends on i − j alone and has the head's own totals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...maths.float64 import as_float64

_MOST_STEPS: Final = 1000  # the largest number of steps in a fit
_CLOSE: Final = 1e-5  # a fit ends when less than this share of the attention lies at a wrong distance
_ROUNDING: Final = 1e-6  # scores count as equal if their spread is below this share of the largest score


def received_by_segment(
    pattern: Float[Tensor, "batch head row key"],
    rows: Int[Tensor, "batch row"],
    keys: Int[Tensor, "batch key"],
    lowest: int,
    sums: Float[Tensor, "batch head query_segment key_segment"],
) -> None:
    """Adds Σ p_ij over the rows of one segment and the keys of another to `sums`, in place, for every pair of segments.

    `rows` and `keys` hold the segment of each row and key, −1 at padding; `sums` begins with the segment `lowest`, the
    lowest segment of the block's rows.
    """
    here = int(rows.max()) + 1 - lowest
    members = rows[:, None] - lowest == torch.arange(here, device=rows.device)[:, None]
    by_key = torch.matmul(members[:, None].to(pattern), pattern)
    segments = sums.shape[-1]
    place = keys.masked_fill(keys < 0, segments)[:, None, None].expand(by_key.shape)
    # Padding has a separate column, which is dropped.
    by_segment = by_key.new_zeros(*by_key.shape[:-1], segments + 1).scatter_add_(-1, place, by_key)
    sums[:, :, :here] += by_segment[..., :segments]


@dataclass(frozen=True)
class ByDistance:
    """Attention by distance alone: p̂_ij = r_i w(i − j), with a head's own totals by distance and by row.

    This is the maximum-likelihood pattern of this form, and it reproduces the pattern of a head that attends by
    distance alone. (The mean of p_ij at each distance fails: its rows do not sum to 1, and on a uniform causal head of
    1,000 tokens it misplaces 26 % of the attention, because keys near the beginning receive more.)
    """

    weights: Float[Tensor, "*places distance"]  # w(d), for d from 0, or from 1 − length if tokens attend both ways
    factors: Float[Tensor, "*places row"]  # r_i
    first_key: int = 0  # the first key that counts: 1 if the text's first token is left out

    @classmethod
    def fitted(
        cls, sums: Float[Tensor, "*places distance"], rows: Float[Tensor, "*places row"], first_key: int = 0
    ) -> "ByDistance":
        """Fits the pattern with these totals Σ p_ij by distance and by row, by iterative proportional fitting.

        The fit of a head ends when less than 10⁻⁵ of its attention lies at a wrong distance. Keys that a window hides
        stay at 0, because the totals at their distances are 0.

        >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.2, 0.5, 0.3]])
        >>> fit = ByDistance.fitted(torch.tensor([1.7, 1.1, 0.2]), torch.ones(3))
        >>> fit.cells([0, 1, 3])
        tensor([[1.0000, 0.0000],
                [0.4056, 0.5944]], dtype=torch.float64)
        """
        sums, rows = as_float64(sums).clamp_min(0.0), as_float64(rows)
        fitted = sums.new_ones(sums.shape).view(-1, sums.shape[-1])
        left, weights = torch.arange(len(fitted), device=sums.device), fitted
        wanted, by_row = sums.reshape(fitted.shape), rows.reshape(len(fitted), -1)
        close = _CLOSE * by_row.sum(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        for _ in range(_MOST_STEPS):
            reached = cls(weights, cls(weights, by_row, first_key)._scaled(by_row), first_key)._at_distances
            weights = torch.where(reached > 0, wanted * weights / reached, 0.0)
            fitted[left] = weights
            far = (reached - wanted).abs().sum(dim=-1) >= close
            if not bool(far.all()):
                left, weights, wanted, by_row, close = (
                    values[far] for values in (left, weights, wanted, by_row, close)
                )
            if not len(left):
                break
        all_weights = fitted.view(sums.shape)
        return cls(all_weights, cls(all_weights, rows, first_key)._scaled(rows), first_key)

    def at(self, place: int) -> "ByDistance":
        """Returns the pattern at one index of the first axis."""
        return ByDistance(self.weights[place], self.factors[place], self.first_key)

    @property
    def _length(self) -> int:
        return self.factors.shape[-1]

    @property
    def _zero(self) -> int:
        return (self.weights.shape[-1] - 1) // 2 if self.weights.shape[-1] > self._length else 0

    @cached_property
    def _below(self) -> Float[Tensor, "*places distance_and_end"]:
        """Returns F, the sum of the weights below each distance."""
        return torch.nn.functional.pad(self.weights.cumsum(dim=-1), (1, 0))

    def _scaled(self, rows: Float[Tensor, "*places row"]) -> Float[Tensor, "*places row"]:
        """Returns the factors r_i that give rows these sums."""
        row = torch.arange(self._length, device=self.weights.device)
        farthest, nearest = row - self.first_key + self._zero + 1, row - self._length + 1 + self._zero
        seen = self._below[..., farthest] - self._below[..., nearest.clamp_min(0)]
        return torch.where(seen > 0, rows / seen, 0.0)

    @property
    def _at_distances(self) -> Float[Tensor, "*places distance"]:
        length = self._length
        distance = torch.arange(self.weights.shape[-1], device=self.weights.device) - self._zero
        before = torch.nn.functional.pad(self.factors.cumsum(dim=-1), (1, 0))
        end, start = (length + distance).clamp_max(length), (distance + self.first_key).clamp(0, length)
        return self.weights * (before[..., torch.maximum(start, end)] - before[..., start])

    def cells(self, starts: Sequence[int]) -> Float[Tensor, "*places query_segment key_segment"]:
        """Returns the pattern's M: the mean over i ∈ s of Σ_{j∈t} p̂_ij = r_i (F(i − t_0 + 1) − F(i − t_1 + 1)).

        `starts` are the tokens at which segments begin, followed by the length of the text.
        """
        row = torch.arange(self._length, device=self.weights.device)
        edges = torch.tensor(starts, device=self.weights.device)
        columns = []
        for start in starts:
            place = row - max(start, self.first_key) + self._zero + 1
            summed = (self.factors * self._below[..., place.clamp(0, self.weights.shape[-1])]).cumsum(dim=-1)
            columns.append(torch.nn.functional.pad(summed, (1, 0))[..., edges].diff(dim=-1))
        sums = torch.stack(columns, dim=-1)
        return (sums[..., :-1] - sums[..., 1:]) / edges.diff()[:, None]


def same_distance(
    mass: Float[Tensor, "*places query_segment key_segment"],
) -> Float[Tensor, "*places query_segment key_segment"]:
    """Replaces each cell with the mean of M over all cells at the same distance in segments.

    >>> same_distance(torch.tensor([[1.0, 0.0], [0.4, 0.6]]))
    tensor([[0.8000, 0.0000],
            [0.4000, 0.8000]])
    """
    count = mass.shape[-1]
    place = torch.arange(count, device=mass.device)
    lag = (place[:, None] - place + count - 1).flatten()
    sums = mass.new_zeros(*mass.shape[:-2], 2 * count - 1).index_add_(-1, lag, mass.flatten(-2))
    return (sums / torch.bincount(lag))[..., lag].view_as(mass)


def receivers(
    per_token: Float[Tensor, "*places query_segment key_segment"], gap: int
) -> Float[Tensor, "*places key_segment"]:
    """Averages what each segment receives per token over the segments at least `gap` later.

    r_t = mean over s ≥ t + gap of M_st / |t|; NaN for segments with no such segment. Source: Thought Anchors (arXiv
    2506.19143), with gap 4.

    >>> receivers(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.3, 0.2, 0.5]]), 1)
    tensor([0.4000, 0.2000,    nan])
    """
    count = per_token.shape[-1]
    later = torch.ones(count, count, device=per_token.device).tril(-gap).to(per_token)
    return (per_token * later).sum(dim=-2) / later.sum(dim=0)


def peakedness(scores: Float[Tensor, "*places segment"]) -> Float[Tensor, "*places"]:
    """Computes the excess kurtosis of a head's receiver scores: 0 for a normal distribution, high if few segments stand
    out.

    m_4 / m_2² − 3 with the biased moments, over the segments that have a score, as in Thought Anchors (arXiv
    2506.19143). NaN for fewer than four scores, and for equal scores.

    >>> peakedness(torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, torch.nan]]))
    tensor([0.2500], dtype=torch.float64)
    """
    known = as_float64(scores[..., ~scores.isnan().flatten(0, -2).any(dim=0)])
    if known.shape[-1] < 4:
        return torch.full(scores.shape[:-1], torch.nan, dtype=torch.float64)
    away = known - known.mean(dim=-1, keepdim=True)
    second, fourth = (away.pow(power).mean(dim=-1) for power in (2, 4))
    equal = second.sqrt() <= _ROUNDING * known.abs().amax(dim=-1)
    return (fourth / second**2 - 3).masked_fill(equal, torch.nan)


def by_lag(
    mass: Float[Tensor, "*places query_segment key_segment"], rows: Int[Tensor, " query_segment"], lags: Sequence[int]
) -> tuple[Float[Tensor, "lag ..."], Float[Tensor, " lag"]]:
    """Sums the attention of a text's rows to the segment `lag` segments back, and counts the rows that have one.

    The last lag also counts all segments farther back, and the first lag, if negative, all segments farther ahead.
    Lag 0 is a row's own segment, −1 the next.
    """
    mass, rows = as_float64(mass), as_float64(rows)
    place = torch.arange(mass.shape[-1], device=mass.device)
    back = place[:, None] - place
    back = back.clamp_max(lags[-1]) if lags[0] == 0 else back.clamp(lags[0], lags[-1])
    sums, counts = [], []
    for lag in lags:
        there = back == lag
        weights = rows[:, None] * there
        sums.append((mass * weights).sum(dim=(-2, -1)))
        counts.append((rows * there.any(dim=-1)).sum())
    return torch.stack(sums), torch.stack(counts)
