"""Does one set hurt more than the others? A p-value from all sets, the tested one included.

Formulas: docs/formulas.md#confirming-a-set-of-heads.

If the tested set was drawn at random, each of m sets is as likely to be it, so p = (how many sets are at least as
strong) / m is exact, whatever measures strength. Strength is studentised over groups: among sets chosen for their size
on other texts, raw effects of nothing but noise rank first too often.
"""

from typing import Final

import torch
from jaxtyping import Float
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

CONSISTENT: Final = 0.001
"""Effects whose t a null effect exceeds this rarely are consistent; these are ranked by size."""

SAME: Final = 1e-4
"""Strengths that differ by less than this share are ties: rounding may part them."""


def studentised(values: Float[Tensor, "*place group"]) -> Float[Tensor, "*place"]:
    """t = mean / (standard deviation / √groups); 0 where every value is 0, ±∞ where all are equal.

    >>> studentised(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)).round(decimals=3)
    tensor([3.4640, 0.0000], dtype=torch.float64)
    """
    mean = values.mean(dim=-1)
    error = values.std(dim=-1) / values.shape[-1] ** 0.5
    return torch.where(mean == 0, 0.0, mean / error)


def strength(harm: Float[Tensor, "*place group"]) -> Float[Tensor, "*place"]:
    """The order of effects: t over groups; above t* = t_{groups − 1}(1 − `CONSISTENT`), t* plus the mean.

    t alone cannot tell an effect from one a hundred times smaller that is as consistent, so beyond t*, size decides.
    Only the order of these numbers has a meaning.

    >>> harm = torch.tensor([[1.0, 1.1, 0.9, 1.0, 1.0], [0.01, 0.01, 0.01, 0.01, 0.01], [3.0, -2.0, 4.0, -1.0, 2.0]])
    >>> strength(harm.double()).argsort(descending=True).tolist()
    [0, 1, 2]
    """
    t, mean = studentised(harm), harm.mean(dim=-1)
    limit = float(student_t.ppf(1 - CONSISTENT, harm.shape[-1] - 1))
    return torch.where(t > limit, limit + mean, t)


def rank_p(strengths: Float[Tensor, " set"]) -> float:
    """The share of sets that are at least as strong as the first, itself included; ties count.

    >>> rank_p(torch.tensor([2.0, 1.0, 3.0, 0.5]))
    0.5
    """
    return float(at_least(strengths).double().mean())


def at_least(strengths: Float[Tensor, " set"]) -> Tensor:
    """Which sets are at least as strong as the first, up to rounding (`SAME`)."""
    first = strengths[0]
    return strengths >= first - SAME * first.abs()


def least_p(values: Float[Tensor, "head group"]) -> float:
    """The p-value of the claim that every head's mean is above 0: the largest of their one-sided t tests (Berger 1982).

    >>> round(least_p(torch.tensor([[1.0, 1.2, 0.8, 1.1, 0.9], [0.3, -0.2, 0.4, 0.1, 0.2]]).double()), 4)
    0.0976
    """
    return float(student_t.sf(studentised(values).numpy(), values.shape[-1] - 1).max())


def added_by_each(
    together: Float[Tensor, "set group"],
    alone: Float[Tensor, "set head group"],
    others: Float[Tensor, "set head group"],
) -> Float[Tensor, "set head group"]:
    """What each head adds to a set's effect: ½ (effect alone + effect of the set − effect of its other heads).

    The mean of what removing it does first and what it does last; of two heads, the Shapley value. Heads in series
    (either alone has the full effect) and heads that back each other up (neither alone has one) add half each; one that
    is only along for the ride adds 0.
    """
    return (alone + together[:, None] - others) / 2
