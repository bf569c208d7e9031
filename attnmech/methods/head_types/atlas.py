"""The table of all heads: the type of each head, the evidence for it, and its clearest example."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Final

from ...draw.embed import View
from ...draw.scripts import of_question
from ...draw.text import percent, signed, visible_token
from .figures import letter_of


@dataclass(frozen=True)
class HeadExample:
    """An example row of a head's attention: the tokens up to the query, and the tokens around the key."""

    before: Sequence[str]
    around: Sequence[str]
    key_at: int
    """The index of the key in `around`."""
    weight: float
    """The attention that the key receives."""
    distance: int
    """Query − key."""


@dataclass(frozen=True)
class HeadRow:
    """A head's row of the table; NaN for numbers that were not measured."""

    layer: int
    head: int
    types: Sequence[str]
    nearest: str
    """The type that the numbers describe: the first claimed type, or the one nearest to a claim."""
    score: float
    baseline: float
    low: float
    """The interval of score − baseline."""
    high: float
    writes: float
    copying: float
    example: HeadExample | None


SCRIPT: Final = of_question("head_types", tuple(files(__package__) / name for name in ("atlas.js", "atlas.css")))
"""The script that draws the table."""

COLUMNS = ("head", "type", "score", "baseline", "above baseline", "writes", "copying", "example")
"""The columns of the table. The section's text gives the units."""


def atlas_view(rows: Sequence[HeadRow]) -> View:
    """Builds a table that the reader can sort by a click on a column and filter by type.

    >>> view = atlas_view([HeadRow(2, 6, ("induction",), "induction", 0.957, 0.06, 0.8, 1.0, 3.1, 0.99, None)])
    >>> view.data["rows"][0]["cells"][2:6]
    ['0.957', '0.060', '+0.80 to +1.00', '+3.1']
    >>> view.data["types"]
    ['induction']
    """
    types = list(dict.fromkeys(name for row in rows for name in row.types))
    data = {
        "columns": COLUMNS,
        "rows": [_row(row) for row in rows],
        "types": types,
        "letters": {name: letter_of(name) for name in sorted({*types, *(row.nearest for row in rows)}) if name},
    }
    return View("atlas", "All heads", "", data, (SCRIPT,))


def _row(row: HeadRow) -> dict[str, object]:
    above = "" if math.isnan(row.low) else f"{signed(row.low, '.2f')} to {signed(row.high, '.2f')}"
    values = (row.layer * 100_000 + row.head, None, row.score, row.baseline, row.low, row.writes, row.copying)
    return {
        "name": f"L{row.layer}H{row.head}",
        "types": list(row.types),
        "nearest": row.nearest,
        "cells": [
            f"L{row.layer}H{row.head}",
            "",
            _number(row.score, ".3f"),
            _number(row.baseline, ".3f"),
            above,
            "" if math.isnan(row.writes) else signed(row.writes, ".1f"),
            _number(row.copying, ".2f"),
        ],
        "values": [None if value is None or math.isnan(value) else value for value in values],
        "example": None if row.example is None else _example(row.example),
    }


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _example(example: HeadExample) -> dict[str, object]:
    return asdict(example) | {
        "before": [visible_token(token) for token in example.before],
        "around": [visible_token(token) for token in example.around],
        "weight": percent(example.weight, 0),
    }
