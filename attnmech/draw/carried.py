"""Stores each array of a page's figures once in the page, and tells each slot where its numbers are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

from ..errors import InputError
from .chart import ByChoice, Chart, Slot
from .packing import logarithms, pack_keys, pack_logarithms, pack_texts, pack_values, rounding_error

MOST_PLAIN: Final = 256  # arrays of up to this many numbers are stored unpacked

IN_DETAIL: Final = 2
"""With more than this many numbers per query and head, an array is a detail, which large pages hold for some heads."""


@dataclass
class Carried:
    """The arrays of a page by name; an array that two figures share is stored once."""

    choices: Mapping[str, Sequence[int | str]]
    """The values that a reader of the page can choose from, by the name of the choice."""
    detailed: Sequence[int] | None = None
    """The heads, counted layer by layer, whose details the page holds; None for all heads."""
    tables: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Lists of words, by name; numbers in arrays are indices into them."""
    arrays: dict[str, Any] = field(default_factory=dict)  # all arrays, packed
    _names: dict[object, str] = field(default_factory=dict)

    def column(self, by_choice: ByChoice, name: str, *, in_detail: bool = False) -> dict[str, Any]:
        """The description by which a page finds the values of a choice; `name` is the name of their figure or text.

        If they stand with details, `in_detail`, the page holds them for the same heads.
        """
        for choice, count in zip(by_choice.over, by_choice.values.shape, strict=False):
            offered = self.choices.get(choice, ())
            if count != len(offered):
                raise InputError(
                    f"`{name}` has {count} {choice}s but the page offers {len(offered)} ({list(offered)}); make its "
                    "section from the same run, with the page's layers."
                )
        by_choice = self._of_detailed(by_choice, in_detail=in_detail)
        column: dict[str, Any] = {"array": self.array(by_choice), "over": by_choice.over, "shape": by_choice.shape}
        if by_choice.words:
            column["table"] = self._named(by_choice.words, self.tables, "table", lambda: by_choice.words)
        options = {"digits": by_choice.digits, "fixed": dict(by_choice.fixed) or None}
        return column | {name: value for name, value in options.items() if value is not None}

    def slot(self, slot: Slot, figure: str) -> dict[str, Any]:
        columns = [self.column(column, figure) for column in slot.columns]
        parts = {"less": slot.less, "where": slot.where, "weights": slot.weights}
        carried = {"path": slot.path.split("."), "columns": columns, "equals": slot.equals}
        return carried | {name: part and self.column(part, figure) for name, part in parts.items()}

    def array(self, by_choice: ByChoice) -> str:
        values = by_choice.values
        if values.dtype == object:
            texts = tuple(values.flat)
            return self._named(texts, self.arrays, "texts", lambda: {"texts": pack_texts(texts)})
        digest = sha256(values.tobytes()).digest()
        key = (digest, values.dtype.str, by_choice.logarithmic, len(by_choice.stretches))
        return self._named(key, self.arrays, "array", lambda: _packed(by_choice))

    def _of_detailed(self, by_choice: ByChoice, *, in_detail: bool) -> ByChoice:
        """The values of the heads in detail, along the axis "detailed"; other arrays stay whole."""
        over, values = by_choice.over, by_choice.values
        if self.detailed is None or not {"layer", "head"} <= by_choice.follows:
            return by_choice
        at = over.index("layer")
        before, after = values.shape[:at], values.shape[at + 2 :]
        by_query = values.size / (math.prod(values.shape[at : at + 2]) * len(self.choices["query"]))
        if by_query <= IN_DETAIL and not in_detail:
            return by_choice
        kept = values.reshape(*before, -1, *after).take(self.detailed, axis=at)
        return replace(
            by_choice,
            values=kept,
            over=(*over[:at], "detailed", *over[at + 2 :]),
            blocks=math.prod(kept.shape[: at + 1]),
        )

    def _named(self, key: object, place: dict[str, Any], kind: str, made: Callable[[], Any]) -> str:
        if key not in self._names:
            self._names[key] = f"{kind}-{len(place)}"
            place[self._names[key]] = made()
        return self._names[key]


def error_of(chart: Chart) -> float:
    """The largest error of a chart's numbers on a page, in their units, without those whose ratios are preserved."""
    return max(
        sum(carried_error(part) for part in (column, slot.less) if part is not None and not part.logarithmic)
        for slot in chart.slots
        for column in slot.columns
    )


def carried_error(by_choice: ByChoice) -> float:
    """The largest error of a number on a page: in its units, or as a share of it if ratios are preserved."""
    values = by_choice.values
    if values.dtype.kind != "f":
        return 0.0
    if by_choice.logarithmic:
        return math.expm1(rounding_error(logarithms(by_choice.stretches), axes=1))
    return 0.0 if values.size <= MOST_PLAIN else rounding_error(by_choice.stretches, axes=1)


def _packed(by_choice: ByChoice) -> Mapping[str, Any]:
    values = by_choice.stretches
    if values.size <= MOST_PLAIN and not by_choice.logarithmic:
        return {"plain": [by_choice.plain(value) for value in values.flat]}
    if values.dtype.kind in "iu":
        return pack_keys(values, axes=1)
    return pack_logarithms(values, axes=1) if by_choice.logarithmic else pack_values(values, axes=1)
