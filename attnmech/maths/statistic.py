"""What is known of a statistic by layer and head? Declared once: formula, unit, bounds, and what it says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number of each head that is a mean over rows."""

    name: str
    meaning: str
    """The sentence that documents it."""
    label: str = ""
    """What stands beside its scale, without the unit; by default its name."""
    unit: str = ""
    bounds: tuple[float, float] = (0.0, 1.0)
    """No mean can be outside; intervals are clamped to them."""

    @property
    def axis(self) -> str:
        """What stands beside its scale, with the unit.

        >>> Statistic(name="distance", meaning="Mean distance.", label="mean distance", unit="tokens").axis
        'mean distance, tokens'
        """
        label = self.label or self.name.replace("_", " ")
        return f"{label}, {self.unit}" if self.unit else label


@dataclass(frozen=True, kw_only=True)
class RowStatistic(Statistic):
    """One with a formula: its value on each row, and the rows on which it is defined."""

    defined: Callable[[Any], Tensor]
    value: Callable[[Any], Tensor]


Kind = TypeVar("Kind", bound=Statistic)


class Statistics(dict[str, Kind], Generic[Kind]):
    """Statistics by name, in the order of the axis `statistic`.

    >>> both = Statistics(Statistic(name="first", meaning="…"), Statistic(name="second", meaning="…"))
    >>> list(both), both.place("second")
    (['first', 'second'], 1)
    """

    def __init__(self, *statistics: Kind) -> None:
        super().__init__({each.name: each for each in statistics})

    def place(self, name: str) -> int:
        """Where a statistic is along the axis."""
        return list(self).index(name)
