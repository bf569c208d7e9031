"""Formulas of directions (docs/formulas.md#steering)."""

from typing import Final

import torch
from jaxtyping import Float
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ...maths.intervals import exact_interval

ROUNDING: Final = 1e-6
"""Places along a direction below this share of the largest activation are attributed to rounding."""

Interval = tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]
"""The low and the high end."""


def held_out_scores(
    one: Float[Tensor, "one *place d"], other: Float[Tensor, "other *place d"]
) -> tuple[Float[Tensor, "*place one"], Float[Tensor, "*place other"]]:
    """Where each text lies along the direction that the texts of the other half give: (x − midpoint) · u.

    Texts with even and with odd numbers are the halves. u is the unit vector from the mean of `other` to that of `one`
    in the half without the text, and the midpoint lies between these means. A place that only rounding distinguishes
    from the midpoint is 0.

    >>> one, other = torch.tensor([[2.0], [4.0], [3.0], [3.0]]), torch.tensor([[0.0], [0.0], [1.0], [-1.0]])
    >>> [scores.tolist() for scores in held_out_scores(one, other)]
    [[0.5, 2.5, 1.5, 1.5], [-1.5, -1.5, -0.5, -2.5]]
    """
    scores = [torch.empty(group.shape[:-1], dtype=torch.float64) for group in (one, other)]
    for half in (0, 1):
        means = [group[1 - half :: 2].double().mean(dim=0) for group in (one, other)]
        direction = torch.nn.functional.normalize(means[0] - means[1], dim=-1)
        for group, of_group in zip((one, other), scores, strict=True):
            of_group[half::2] = ((group[half::2].double() - sum(means) / 2) * direction).sum(dim=-1)
    size = max(float(group.double().norm(dim=-1).max()) for group in (one, other))
    scores = [of_group.masked_fill(of_group.abs() <= ROUNDING * size, 0.0) for of_group in scores]
    return scores[0].movedim(0, -1), scores[1].movedim(0, -1)


def separated_share(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"]) -> Float[Tensor, "*place"]:
    """The mean of two shares: texts of `one` above 0, and texts of `other` below. 0 counts half; 0.5 is chance."""
    return (_above(one) + _above(-other)) / 2


def _above(scores: Float[Tensor, "*place text"]) -> Float[Tensor, "*place"]:
    """The share of texts above 0; those at 0 count half."""
    return (scores.sign() + 1).double().mean(dim=-1) / 2


def share_interval(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float) -> Interval:
    """The interval of `separated_share`: the mean of the exact binomial intervals of both shares, each at
    (1 + level) / 2, so that together they hold at `level`.
    """
    error = (1 - level) / 2
    shares = _above(one), _above(-other)
    ends = [exact_interval(shares[0], one.shape[-1], error), exact_interval(shares[1], other.shape[-1], error)]
    return (ends[0][0] + ends[1][0]) / 2, (ends[0][1] + ends[1][1]) / 2


def difference_interval(
    one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float
) -> Interval:
    """Welch's t interval of mean(one) − mean(other), as of half as many texts.

    Each half is judged by the direction of the other, so both halves err to the same side: d₀ · d₁ / |d₁| and
    d₀ · d₁ / |d₀|, with d₀ and d₁ the mean differences of the halves, always have the same sign.
    """
    halves = one.shape[-1] / 2, other.shape[-1] / 2
    first, second = (group.var(dim=-1) / count for group, count in zip((one, other), halves, strict=True))
    error = first + second
    freedom = error**2 / (first**2 / (halves[0] - 1) + second**2 / (halves[1] - 1))
    freedom = torch.where(error > 0, freedom, 1.0)
    half = torch.as_tensor(student_t.ppf((1 + level) / 2, freedom.numpy())) * error.sqrt()
    difference = one.mean(dim=-1) - other.mean(dim=-1)
    return difference - half, difference + half
