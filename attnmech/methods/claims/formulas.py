"""p-values that rank a set of heads among all sets of its shape, itself included.

Formulas: docs/formulas.md#confirming-a-set-of-heads.

If the tested set was drawn at random, it is equally likely to be any of the m sets, so p = (number of sets at least as
strong) / m is exact, whatever measures strength. Strength is studentised over groups: when sets are selected for the
size of their effect on other texts, raw effects that are pure noise rank first too often.
"""

from typing import Final

import torch
from jaxtyping import Float
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

CONSISTENT: Final = 0.001
"""An effect is consistent if a null effect exceeds its t with less than this probability. Consistent effects are ranked
by size.
"""

SAME: Final = 1e-4
"""Strengths that differ by less than this share count as ties, because rounding can separate equal strengths."""


def studentised(values: Float[Tensor, "*place group"]) -> Float[Tensor, "*place"]:
    """Returns t = mean / (standard deviation / √groups); 0 if all values are 0, ±∞ if all are equal but not 0.

    >>> studentised(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)).round(decimals=3)
    tensor([3.4640, 0.0000], dtype=torch.float64)
    """
    mean = values.mean(dim=-1)
    error = values.std(dim=-1) / values.shape[-1] ** 0.5
    return torch.where(mean == 0, 0.0, mean / error)


def strength(harm: Float[Tensor, "*place group"]) -> Float[Tensor, "*place"]:
    """Ranks effects by t over groups, or by t* plus the mean where t is above t* = t_{groups − 1}(1 − `CONSISTENT`).

    t alone does not distinguish an effect from an equally consistent effect that is a hundred times smaller, so above
    t* size decides. Only the order of these numbers is meaningful.

    >>> harm = torch.tensor([[1.0, 1.1, 0.9, 1.0, 1.0], [0.01, 0.01, 0.01, 0.01, 0.01], [3.0, -2.0, 4.0, -1.0, 2.0]])
    >>> strength(harm.double()).argsort(descending=True).tolist()
    [0, 1, 2]
    """
    t, mean = studentised(harm), harm.mean(dim=-1)
    limit = float(student_t.ppf(1 - CONSISTENT, harm.shape[-1] - 1))
    return torch.where(t > limit, limit + mean, t)


def rank_p(strengths: Float[Tensor, " set"]) -> float:
    """Returns the share of sets that are at least as strong as the first set, including the first set itself and ties.

    >>> rank_p(torch.tensor([2.0, 1.0, 3.0, 0.5]))
    0.5
    """
    return float(at_least(strengths).double().mean())


def at_least(strengths: Float[Tensor, " set"]) -> Tensor:
    """True for the sets that are at least as strong as the first set, up to rounding (`SAME`)."""
    first = strengths[0]
    return strengths >= first - SAME * first.abs()


def least_p(values: Float[Tensor, "head group"]) -> float:
    """Returns the p-value of the claim that every head's mean is above 0: the largest of the one-sided t tests (Berger
    1982).

    >>> round(least_p(torch.tensor([[1.0, 1.2, 0.8, 1.1, 0.9], [0.3, -0.2, 0.4, 0.1, 0.2]]).double()), 4)
    0.0976
    """
    return float(student_t.sf(studentised(values).numpy(), values.shape[-1] - 1).max())


def added_by_each(
    together: Float[Tensor, "set group"],
    alone: Float[Tensor, "set head group"],
    others: Float[Tensor, "set head group"],
) -> Float[Tensor, "set head group"]:
    """Returns each head's contribution to its set's effect: ½ (effect alone + effect of the set − effect of the
    others).

    This is the mean of the effects of removing the head first and removing it last. For two heads it is the Shapley
    value. Two heads in series (removing either has the full effect) or two that back each other up (removing either
    alone has none) contribute half each. A head that does nothing contributes 0.
    """
    return (alone + together[:, None] - others) / 2
