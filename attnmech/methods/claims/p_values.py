"""The measurements of a set of heads and of all sets of its shape, with p-values over the sets.

Formulas: docs/formulas.md#confirming-a-set-of-heads.

If the tested set was drawn at random, it is equally likely to be any of the m sets, so p = (number of sets at least as
strong) / m is exact, whatever measures strength. Strength is studentised over groups: when sets are selected for the
size of their effect on other texts, raw effects that are pure noise rank first too often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ...interventions import Head
from ...maths.intervals import LEVEL, TextMeans
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...runs.ablations import METHODS
from .set_effects import HeadSet, OtherTask
from .tasks import group_means

CONSISTENT: Final = 0.001
"""An effect is consistent if a null effect exceeds its t with less than this probability. Consistent effects are ranked
by size.
"""

SAME: Final = 1e-4  # strengths that differ by less than this share are ties: rounding can separate equal ones


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


ALPHA: Final = 0.05  # the largest p-value that confirms a claim
MATCHED: Final = 20  # the number of sets with the nearest effect on general loss that are compared with the tested set
VERDICTS: Final = ("confirmed", "in part", "not confirmed", "cannot be confirmed")


@dataclass(frozen=True, repr=False)
class SetTest(PagedResult):
    """The measurements of a set of heads and of all sets of its shape."""

    _SUBTRACT = "subtract what you compare: one.harm - other.harm"
    _AXES: ClassVar = {"case": "case_groups", "member": "heads"}

    task: str
    metric: str
    method: str
    """How heads were removed: "zero", "mean", "resample", or the sentence of an intervention."""
    heads: tuple[Head, ...]
    chosen_by_rule: bool
    """Whether the heads were chosen on the discovery half."""
    higher_is_better: bool
    possible: int
    """The number of sets of the shape. `sets` contains all of these sets, or a random sample."""
    wider: bool
    """Whether controls also come from other layers."""
    groups: tuple[str, ...]
    """The groups of the confirmation half."""
    discovery_groups: tuple[str, ...]
    case_groups: tuple[str, ...]
    """The group of each case."""
    sets: Int[Tensor, "set member 2"]
    """The (layer, head) of each set's heads. The first set is the tested set."""
    before: Float[Tensor, " case"]
    """The metric with all heads."""
    after: Float[Tensor, "set case"]
    """The metric without each set."""
    after_alone: Float[Tensor, "set member case"]
    """The metric without one head of the set."""
    after_rest: Float[Tensor, "set member case"]
    """The metric without the other heads of the set."""
    after_all: Float[Tensor, " case"]
    """The metric without any head of the model."""
    after_only: Float[Tensor, " case"]
    """The metric with only the heads of the tested set."""
    others: tuple[OtherTask, ...]
    provenance: Provenance
    general: Float[Tensor, "set text"] | None = None
    """The change of the loss on other texts when each set is removed, in nats."""

    def _check(self) -> None:
        super()._check()
        if tuple(dict.fromkeys(self.case_groups)) != self.groups or self._set(0) != self.heads:
            raise ValueError("`case_groups` must name `groups` in order, and the first of `sets` must be `heads`")

    @property
    def _done(self) -> str:
        """What was done to heads: "removed", or "changed" by an intervention."""
        return "removed" if self.method in METHODS else "changed"

    def _harm_in_groups(self, after: Float[Tensor, "*place case"]) -> Float[Tensor, "*place group"]:
        """Returns how much worse the model does than with all heads, averaged over the cases of each group."""
        return group_means(self.before - after if self.higher_is_better else after - self.before, self.case_groups)

    @cached_property
    def harm(self) -> Float[Tensor, "set group"]:
        """How much worse the model does in each group without each set."""
        return self._harm_in_groups(self.after)

    @cached_property
    def _means(self) -> TextMeans:
        return TextMeans.of_values(-self.harm[0] if self.higher_is_better else self.harm[0])

    def interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Low and high end of the t interval of `effect` over groups; NaN for fewer than five groups."""
        return self._means.interval(level)

    @property
    def effect(self) -> float:
        """The metric without the tested set minus the metric with all heads, averaged over groups."""
        return float(self._means.mean)

    @cached_property
    def as_strong(self) -> Bool[Tensor, " set"]:
        """True for the sets that are at least as strong as the tested set, including that set."""
        return at_least(strength(self.harm))

    @property
    def p(self) -> float:
        """The share of all sets that are at least as strong as the tested set."""
        return rank_p(strength(self.harm))

    @property
    def least_p(self) -> float:
        """The smallest p-value that this number of sets allows."""
        return 1 / len(self.sets)

    @cached_property
    def _added(self) -> Float[Tensor, "set member group"]:
        return added_by_each(self.harm, self._harm_in_groups(self.after_alone), self._harm_in_groups(self.after_rest))

    @cached_property
    def _as_needed(self) -> Bool[Tensor, " set"]:
        """True for the sets whose weakest head adds at least as much, by strength, as the tested set's weakest head."""
        return at_least(strength(self._added).amin(dim=1))

    @property
    def p_each(self) -> float:
        """The p-value of the claim that every head adds: the share of sets in which every head adds at least as much.

        For a single head it is `p`. It is never below the p-value of a t test of the hypothesis that some head of the
        tested set adds nothing, because the weaker of two heads that act together adds more than the weaker of two that
        do not, even if neither has an effect.
        """
        share = float(self._as_needed.double().mean())
        return share if len(self.heads) == 1 else max(share, least_p(self._added[0]))

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`.

        "confirmed" if the intervals of the effect and of each head's contribution exclude 0 and p_each ≤ 0.05; "in
        part" if this holds for the set as a whole (p ≤ 0.05) but not for each of its heads; "cannot be confirmed" if
        there are so few sets that no p-value could be 0.05 or less.
        """
        if self.least_p > ALPHA:
            return VERDICTS[3]
        low, high = self._ends
        worse = high < 0 if self.higher_is_better else low > 0
        if worse and self.p_each <= ALPHA and not self._idle:
            return VERDICTS[0]
        return VERDICTS[1] if worse and self.p <= ALPHA and len(self.heads) > 1 else VERDICTS[2]

    @cached_property
    def _adds(self) -> TextMeans:
        return TextMeans.of_values(self._added[0])

    @property
    def _idle(self) -> list[Head]:
        """The heads that do not clearly add to the harm.

        The claim that all heads add requires every interval to exclude 0, so the intervals are pointwise (Berger 1982).
        """
        low, _ = self._adds.interval()
        return [head for head, end in zip(self.heads, low.tolist(), strict=True) if not end > 0]

    @cached_property
    def _matched(self) -> Int[Tensor, " matched"]:
        """The sets nearest to the tested set in their effect on general loss, at most 20. Empty without `general`."""
        if self.general is None:
            return torch.zeros(0, dtype=torch.long)
        mean = self.general.mean(dim=-1)
        return 1 + (mean[1:] - mean[0]).abs().argsort(stable=True)[:MATCHED]

    @property
    def restored(self) -> TextMeans:
        """The share that the set alone restores: (metric with only the set − with no head) / (with all heads − with no
        head).
        """
        alone, whole = (
            group_means(metric - self.after_all, self.case_groups) for metric in (self.after_only, self.before)
        )
        return TextMeans.of_ratio(alone, whole)

    def to_frame(self) -> pd.DataFrame:
        """One row per set, the tested set first.

        Columns: heads; tested; effect with its interval over groups; t of the harm; as_strong; adds_least, the harm
        added by the head that adds least; as_needed; general_loss, matched.
        """
        sign = -1 if self.higher_is_better else 1
        means = TextMeans.of_values(sign * self.harm)
        low, high = means.interval()
        number = torch.arange(len(self.sets))
        return pd.DataFrame(
            {
                "heads": [named(self._set(row)) for row in range(len(self.sets))],
                "tested": (number == 0).numpy(),
                "effect": means.mean.numpy(),
                "effect_low": low.numpy(),
                "effect_high": high.numpy(),
                "t": studentised(self.harm).numpy(),
                "as_strong": self.as_strong.numpy(),
                "adds_least": self._added.mean(dim=-1).amin(dim=1).numpy(),
                "as_needed": self._as_needed.numpy(),
                "general_loss": torch.nan if self.general is None else self.general.mean(dim=-1).numpy(),
                "matched": torch.isin(number, self._matched).numpy(),
            }
        )

    def _set(self, number: int) -> HeadSet:
        return tuple((layer, head) for layer, head in self.sets[number].tolist())

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = self.interval()
        return float(low), float(high)

    @property
    def _sharing(self) -> Bool[Tensor, " set"]:
        same = (self.sets[:, :, None] == self.sets[0]).all(dim=-1)
        return same.flatten(1).any(dim=1)


def named(heads: Sequence[Head]) -> str:
    """Names a set's heads: "L1H0 L2H3"."""
    return " ".join(f"L{layer}H{head}" for layer, head in heads)
