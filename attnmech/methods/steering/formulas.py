"""Formulas of directions (docs/formulas.md#steering)."""

import torch
from jaxtyping import Float
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ...maths.shares import exact_interval

Interval = tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]
"""The low and the high end."""


def held_out_scores(
    one: Float[Tensor, "one *place d"], other: Float[Tensor, "other *place d"]
) -> tuple[Float[Tensor, "*place one"], Float[Tensor, "*place other"]]:
    """Where each text lies along the direction that the texts of the other half give: (x − midpoint) · u.

    Texts with even and with odd numbers are the halves. u is the unit vector from the mean of `other` to that of `one`
    in the half without the text, and the midpoint lies between these means.

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
    return scores[0].movedim(0, -1), scores[1].movedim(0, -1)


def separated_share(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"]) -> Float[Tensor, "*place"]:
    """The mean of two shares: texts of `one` above 0, and texts of `other` below. 0.5 is chance."""
    return ((one > 0).double().mean(dim=-1) + (other < 0).double().mean(dim=-1)) / 2


def share_interval(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float) -> Interval:
    """The interval of `separated_share`: the mean of the exact binomial intervals of both shares, each at
    (1 + level) / 2, so that together they hold at `level`.
    """
    error = (1 - level) / 2
    shares = (one > 0).double().mean(dim=-1), (other < 0).double().mean(dim=-1)
    ends = [exact_interval(shares[0], one.shape[-1], error), exact_interval(shares[1], other.shape[-1], error)]
    return (ends[0][0] + ends[1][0]) / 2, (ends[0][1] + ends[1][1]) / 2


def difference_interval(
    one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float
) -> Interval:
    """Welch's t interval of mean(one) − mean(other)."""
    first, second = (group.var(dim=-1) / group.shape[-1] for group in (one, other))
    error = first + second
    freedom = error**2 / (first**2 / (one.shape[-1] - 1) + second**2 / (other.shape[-1] - 1))
    freedom = torch.where(error > 0, freedom, 1.0)
    half = torch.as_tensor(student_t.ppf((1 + level) / 2, freedom.numpy())) * error.sqrt()
    difference = one.mean(dim=-1) - other.mean(dim=-1)
    return difference - half, difference + half
