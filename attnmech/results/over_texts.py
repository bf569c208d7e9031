"""Computes intervals and tests for a value measured on every text at each place (a head, a position, a pair, a
step).
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..maths.copies import distinct_of
from ..maths.intervals import LEVEL, TextMeans, checked_level
from .provenance import Provenance


class OverTexts:
    """Means over texts with their intervals; a subclass supplies the values."""

    provenance: Provenance

    @property
    @abstractmethod
    def _measured_values(self) -> Float[Tensor, "*place text"]:
        """The value at each place on each text; NaN where it was not measured."""

    @property
    def _copies(self) -> Sequence[int]:
        """Which texts are copies of others (`copies_of`)."""
        return self.provenance.copies

    @property
    def _distinct(self) -> int:
        """The number of texts if copies count once."""
        return distinct_of(self._copies, self._measured_values.shape[-1])

    @cached_property
    def _means(self) -> TextMeans:
        return TextMeans.of_values(self._measured_values, self._copies)

    def interval(self, level: float = LEVEL) -> Any:
        """Low and high end of the pointwise t interval over texts, `[*place]`; NaN for fewer than five texts."""
        return self._means.interval(level)

    def simultaneous(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Simultaneous intervals: they hold for all places together, and therefore also for the place with the largest
        value.

        Source: `attnmech.maths.intervals`: studentised max-T, with heavy-tailed places in a separate group.
        """
        return self._means.simultaneous(checked_level(level))

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether more texts than chance allows have the sign of the mean.

        Decided by an exact sign test at 5 %, corrected for all places by Holm's procedure; `clear_size` says whether
        the mean also differs from 0. Source: `attnmech.maths.intervals`.
        """
        return self._means.clear

    @property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """Whether the simultaneous 95 % interval of the mean excludes 0, and no single text dominates (`one_text`)."""
        return self._means.clear_size

    @property
    def agreeing(self) -> Int[Tensor, "*place"]:
        """The number of texts on which the value has the sign of the mean."""
        return self._means.agreeing

    @property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ |value|; intervals of such means are too narrow."""
        return self._means.one_text

    def _columns(self, name: str) -> dict[str, Tensor]:
        """The columns of a table for these means: the name, _low, _high and `clarity_of`; each is `[*place]`."""
        low, high = self._means.interval()
        ends = {name: self._means.mean, f"{name}_low": low, f"{name}_high": high}
        return ends | clarity_of(self._means)


def clarity_of(means: TextMeans) -> dict[str, Tensor]:
    """The columns that follow an effect in a table: agreeing, clear, clear_size, one_text."""
    return {name: getattr(means, name) for name in ("agreeing", "clear", "clear_size", "one_text")}
