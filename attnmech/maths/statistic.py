"""Declares a statistic by layer and head in one place: formula, name, unit, bounds and meaning."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar, overload

from torch import Tensor

POSITIVE: Final = (0.0, math.inf)
UNBOUNDED: Final = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number for each head or each layer, usually a mean over rows, declared in the body of a class.

    In a result, the attribute is the statistic's value: a tensor.

    >>> class Sizes:
    ...     distance = Statistic(meaning="Mean distance.", label="mean distance", unit="tokens")
    >>> Sizes.distance.name, Sizes.distance.axis
    ('distance', 'mean distance, tokens')
    """

    name: str = ""
    """The name of the attribute."""
    meaning: str
    """The sentence that documents the statistic."""
    label: str = ""
    """The label of its scale, without the unit; by default its name."""
    short: str = ""
    """Its name in column headings and sentences; by default its name."""
    unit: str = ""
    printed: bool = False
    """Whether the command line prints its column; files have all columns."""
    tested: bool = False
    """Whether it is compared with 0: a table then says where its sign and its size are clear."""
    axes: str = ""
    """The axes of its tensors, if the table does not show them."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """The least and the largest possible mean; intervals are clamped to them."""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "__doc__", self.meaning)

    @overload
    def __get__(self, result: None, owner: type) -> Self: ...

    @overload
    def __get__(self, result: object, owner: type) -> Tensor: ...

    def __get__(self, result: Any, owner: type) -> "Self | Tensor":
        """The declaration or, in a result, its value."""
        return self if result is None else result._value_of(self.name)

    @property
    def title(self) -> str:
        """`short`, or its name in words."""
        return self.short or self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """The label of its scale, with the unit."""
        label = self.label or self.name.replace("_", " ")
        return f"{label}, {self.unit}" if self.unit else label


@dataclass(frozen=True, kw_only=True)
class RowStatistic(Statistic):
    """A statistic with a formula: its value on each row, and the rows on which it is defined."""

    defined: Callable[[Any], Tensor]
    value: Callable[[Any], Tensor]


Kind = TypeVar("Kind", bound=Statistic)


class Statistics(dict[str, Kind], Generic[Kind]):
    """The statistics of one kind that a class declares, by name, in the order of the axis `statistic`.

    >>> class Both:
    ...     first = Statistic(meaning="…")
    ...     second = Statistic(meaning="…")
    >>> both = Statistics(Both, Statistic)
    >>> list(both), both.place("second")
    (['first', 'second'], 1)
    """

    def __init__(self, declared: type, kind: type[Kind]) -> None:
        members = {name: member for base in reversed(declared.__mro__) for name, member in vars(base).items()}
        super().__init__({name: member for name, member in members.items() if isinstance(member, kind)})

    def place(self, name: str) -> int:
        return list(self).index(name)

    @property
    def printed(self) -> Iterable[Kind]:
        """The statistics that the command line prints."""
        return [statistic for statistic in self.values() if statistic.printed]
