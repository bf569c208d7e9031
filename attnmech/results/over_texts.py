"""A value at each place (a head, a position, a pair, a step), measured text by text: its mean and what may be said."""

from abc import abstractmethod
from functools import cached_property
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from ..maths.intervals import LEVEL, TextMeans, checked_level


class OverTexts:
    """Means over texts with their intervals; a subclass says of which values."""

    @property
    @abstractmethod
    def _measured_values(self) -> Float[Tensor, "*place text"]:
        """The value at each place on each text; NaN where it was not measured."""

    @cached_property
    def _means(self) -> TextMeans:
        return TextMeans.of_values(self._measured_values)

    def interval(self, level: float = LEVEL) -> Any:
        """Low and high end of the t interval over texts at each place by itself, `[*place]`; NaN under five texts."""
        return self._means.interval(level)

    def simultaneous(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """The same as intervals that hold for all places together, so also for one that is picked of them.

        Source: `attnmech.maths.intervals`, studentised max-T.
        """
        return self._means.simultaneous(checked_level(level))

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether a mean can be told from 0 as one of all: its simultaneous 95 % interval leaves 0 out."""
        return self._means.clear

    @property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ |value|: no interval covers means that sit in few texts."""
        return self._means.one_text

    def _columns(self, name: str) -> dict[str, Tensor]:
        """A table's columns of these means: the name, _low and _high, `clear` and `one_text`, `[*place]` each."""
        low, high = self._means.interval()
        ends = {name: self._means.mean, f"{name}_low": low, f"{name}_high": high}
        return ends | {"clear": self.clear, "one_text": self.one_text}
