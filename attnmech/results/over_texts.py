"""What can be said about a value measured text by text at each place (a head, a position, a pair, a step)?"""

from abc import abstractmethod
from functools import cached_property
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from ..maths.intervals import LEVEL, TextMeans, checked_level


class OverTexts:
    """Means over texts with their intervals; a subclass supplies the values."""

    @property
    @abstractmethod
    def _measured_values(self) -> Float[Tensor, "*place text"]:
        """The value at each place on each text; NaN where it was not measured."""

    @cached_property
    def _means(self) -> TextMeans:
        return TextMeans.of_values(self._measured_values)

    def interval(self, level: float = LEVEL) -> Any:
        """Low and high end of the pointwise t interval over texts, `[*place]`; NaN under five texts."""
        return self._means.interval(level)

    def simultaneous(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Simultaneous intervals: they hold for all places together, so also for one picked among them.

        Source: `attnmech.maths.intervals`, studentised max-T.
        """
        return self._means.simultaneous(checked_level(level))

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether a mean differs from 0 among all places: its simultaneous 95 % interval excludes 0."""
        return self._means.clear

    @property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ |value|: intervals undercover means that rest on few texts."""
        return self._means.one_text

    def _columns(self, name: str) -> dict[str, Tensor]:
        """A table's columns for these means: the name, _low and _high, `clear` and `one_text`, `[*place]` each."""
        low, high = self._means.interval()
        ends = {name: self._means.mean, f"{name}_low": low, f"{name}_high": high}
        return ends | {"clear": self.clear, "one_text": self.one_text}
