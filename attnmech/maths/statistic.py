"""Declares a statistic by layer and head in one place: formula, names, unit, bounds and meaning."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number for each head or each layer, usually a mean over rows."""

    name: str
    meaning: str
    """The sentence that documents the statistic."""
    label: str = ""
    """The label of its scale, without the unit; by default its name."""
    short: str = ""
    """Its name in column headings and sentences; by default its name."""
    unit: str = ""
    printed: bool = False
    """Whether the command line prints its column; files have all columns."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """The least and the largest possible mean; intervals are clamped to them."""

    @property
    def title(self) -> str:
        """`short`, or its name in words."""
        return self.short or self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """The label of its scale, with the unit.

        >>> Statistic(name="distance", meaning="Mean distance.", label="mean distance", unit="tokens").axis
        'mean distance, tokens'
        """
        label = self.label or self.name.replace("_", " ")
        return f"{label}, {self.unit}" if self.unit else label


@dataclass(frozen=True, kw_only=True)
class RowStatistic(Statistic):
    """A statistic with a formula: its value on each row, and the rows on which it is defined."""

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
        super().__init__({statistic.name: statistic for statistic in statistics})

    def place(self, name: str) -> int:
        """The index of a statistic along the axis."""
        return list(self).index(name)

    @property
    def printed(self) -> Iterable[Kind]:
        """The statistics that the command line prints."""
        return [statistic for statistic in self.values() if statistic.printed]


class WithStatistics:
    """A result with a property for each of its `STATISTICS`."""

    STATISTICS: ClassVar[Statistics[Any]]
    """The statistics, in the order of the axis `statistic`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for statistic in vars(cls).get("STATISTICS", {}).values():
            setattr(cls, statistic.name, _property_of(statistic))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """A statistic by its name."""

    def _value_of(self, statistic: str) -> Tensor:
        """The statistic of every head, or of every layer."""
        raise NotImplementedError


def _property_of(statistic: Statistic) -> property:
    def value(self: WithStatistics) -> Tensor:
        return self._value_of(statistic.name)

    value.__name__, value.__doc__ = statistic.name, statistic.meaning
    return property(value)
