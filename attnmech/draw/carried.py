"""The arrays of a page's figures, each carried once, and how each slot finds its numbers in them."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Final

from ..errors import InputError
from .chart import ByChoice, Chart, Slot
from .packing import logarithms, pack_keys, pack_logarithms, pack_texts, pack_values, rounding_error

MOST_PLAIN: Final = 256
"""Up to this many numbers are carried unpacked."""


@dataclass
class Carried:
    """The arrays of a page under names; what two figures share is carried once.

    They are packed while the caller goes on: most of that is compression, which holds no interpreter lock.
    """

    choices: Mapping[str, Sequence[int | str]]
    """What can be chosen on the page."""
    tables: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Words that numbers stand for."""
    _names: dict[object, str] = field(default_factory=dict)
    _packed: dict[str, Future[Any]] = field(default_factory=dict)
    _packing: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def arrays(self) -> dict[str, Any]:
        """All arrays, packed; no further ones can be added."""
        with self._packing:
            return {name: each.result() for name, each in self._packed.items()}

    def column(self, given: ByChoice, name: str) -> dict[str, Any]:
        """How a page finds what a choice gives; `name` is that of the figure or text that it belongs to."""
        for choice, count in zip(given.over, given.values.shape, strict=False):
            offered = self.choices.get(choice, ())
            if count != len(offered):
                raise InputError(
                    f"`{name}` has {count} {choice}s and the page offers {len(offered)} ({list(offered)}); "
                    "make its section from the same run, for the page's layers."
                )
        found: dict[str, Any] = {"array": self.array(given), "over": given.over, "shape": given.shape}
        if given.words:
            found["table"] = self._named(given.words, self.tables, "table", lambda: given.words)
        about = {"digits": given.digits, "fixed": dict(given.fixed) or None}
        return found | {name: value for name, value in about.items() if value is not None}

    def slot(self, given: Slot, figure: str) -> dict[str, Any]:
        """A slot that finds its arrays here."""
        columns = [self.column(each, figure) for each in given.columns]
        parts = {"less": given.less, "where": given.where, "weights": given.weights}
        found = {"path": given.path.split("."), "columns": columns, "equals": given.equals}
        return found | {name: part and self.column(part, figure) for name, part in parts.items()}

    def array(self, given: ByChoice) -> str:
        """The name of the array that holds it."""
        values = given.values
        if values.dtype == object:
            texts = tuple(values.flat)
            return self._named(texts, self._packed, "texts", lambda: self._packing.submit(_packed_texts, texts))
        digest = sha256(values.tobytes()).digest()
        key = (digest, values.dtype.str, given.logarithmic, len(given.stretches))
        return self._named(key, self._packed, "array", lambda: self._packing.submit(_packed, given))

    def _named(self, key: object, place: dict[str, Any], kind: str, made: Callable[[], Any]) -> str:
        if key not in self._names:
            self._names[key] = f"{kind}-{len(place)}"
            place[self._names[key]] = made()
        return self._names[key]


def error_of(chart: Chart) -> float:
    """How far its numbers on a page may be off, in their units; those that keep their ratios are left out."""
    return max(
        sum(carried_error(each) for each in (column, slot.less) if each is not None and not each.logarithmic)
        for slot in chart.slots
        for column in slot.columns
    )


def carried_error(given: ByChoice) -> float:
    """How far a number may be from its own: in its units, or as a share of it where ratios are kept."""
    values = given.values
    if values.dtype.kind != "f":
        return 0.0
    if given.logarithmic:
        return math.expm1(rounding_error(logarithms(given.stretches), axes=1))
    return 0.0 if values.size <= MOST_PLAIN else rounding_error(given.stretches, axes=1)


def _packed_texts(texts: tuple[str, ...]) -> Mapping[str, Any]:
    return {"texts": pack_texts(texts)}


def _packed(given: ByChoice) -> Mapping[str, Any]:
    values = given.stretches
    if values.size <= MOST_PLAIN and not given.logarithmic:
        return {"plain": [given.plain(value) for value in values.flat]}
    if values.dtype.kind in "iu":
        return pack_keys(values, axes=1)
    return pack_logarithms(values, axes=1) if given.logarithmic else pack_values(values, axes=1)
