"""Prints a command's summary: lines and the first rows of a table, or everything as one JSON object.

Neither torch nor transformers is imported.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

    from ..maths.statistic import Statistic
    from ..model.run.hooked import HookedModel

VERSION: Final = 1
"""The version of the JSON object; it increases when a key changes its meaning or is removed."""

KEYS: Final = {
    "version": str(VERSION),
    "command": "the command, such as focus",
    "model": "the model, its sizes and its certificate in one line",
    "certificate": "whether every check of the model holds (ok), and the verdict in words",
    "findings": "sentences, the most important first",
    "notes": "what was cut or left out",
    "table": "title, units (by column), rows (by column; null for a missing number) and rows_in_all",
    "files": "absolute paths of the files written",
    "ok": "of check: whether every check holds",
    "points": "of check: for each activation point its name (point), shape, meaning, and why it is absent or refused",
}
"""The keys of the JSON object that `--json` prints."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    """The column's name in the frame."""
    heading: str = ""
    """The heading, if it is not the name with spaces."""
    unit: str = ""

    @property
    def title(self) -> str:
        """The heading with its unit below."""
        heading = self.heading or self.name.replace("_", " ")
        return f"{heading}\n({self.unit})" if self.unit else heading


def columns_of(statistics: "Iterable[Statistic]") -> list[Column]:
    """The columns of statistics, under their names and units."""
    return [Column(statistic.name, statistic.title, statistic.unit) for statistic in statistics]


@dataclass(frozen=True)
class Rows:
    """All rows of a table to print, the most important first."""

    title: str
    """Says what the rows are, and how they are sorted."""
    frame: "pd.DataFrame"
    columns: Sequence[Column]
    """The columns to print; those that the frame lacks are left out."""

    @property
    def present(self) -> Sequence[Column]:
        """The columns that the frame has; ends of intervals only if some are known."""
        there = [column for column in self.columns if column.name in self.frame]
        return [column for column in there if column.unit != "95 %" or self.frame[column.name].notna().any()]


@dataclass(frozen=True)
class Summary:
    """What a command prints."""

    command: str
    model: "HookedModel"
    findings: Sequence[str]
    table: Rows
    notes: Sequence[str] = ()
    """Notes on what was cut or skipped."""
    files: Sequence[str] = ()
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON object."""
    shown: Sequence[RenderableType] = ()
    """What is printed instead of the first rows of the table."""


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets and colons of tokens, names and paths are no markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_summary(summary: Summary, *, rows: int, as_json: bool) -> None:
    """Prints a summary with the first `rows` rows of its table before the findings, or as JSON with all rows."""
    if as_json:
        # With escapes if the output is not in Unicode.
        unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        print(json.dumps(as_object(summary), ensure_ascii=not unicode, allow_nan=False))
        return
    out = console()
    out.print(repr(summary.model), soft_wrap=True)
    for thing in summary.shown:
        out.print(thing)
    if not summary.shown:
        print_rows(out, summary.table, rows)
    for note in summary.notes:
        out.print(note)
    for finding in summary.findings:
        out.print(finding, soft_wrap=True)
    if summary.files:  # the first with its folder, others in the same folder by name only
        first, *others = map(Path, summary.files)
        names = [str(first), *(path.name if path.parent == first.parent else str(path) for path in others)]
        out.print(Text.assemble("\n", Text(" and ").join(Text(name, "bold") for name in names)), soft_wrap=True)


def print_rows(out: Console, shown: Rows, rows: int) -> None:
    """Prints the first `rows` rows with units in the headings, and which columns and how many rows are left out.

    Into a pipe, all columns are printed; a terminal, or the variable COLUMNS, limits the width.
    """
    if not rows:
        return
    columns = [column for column in shown.present if not shown.frame[column.name].isna().all()]
    values = shown.frame.head(rows)[[column.name for column in columns]]
    cells = [[_cell(value) for value in row] for row in values.itertuples(index=False)]
    widths = [
        max(cell_len(line) for line in (*column.title.split("\n"), *(row[place] for row in cells)))
        for place, column in enumerate(columns)
    ]
    limited = out.is_terminal or "COLUMNS" in os.environ
    if limited and sum(widths) + 3 * len(widths) + 1 > out.width:
        is_text = [kind.kind not in "biuf" for kind in values.dtypes]
        widths = [min(width, _MOST_OF_TEXT) if text else width for width, text in zip(widths, is_text, strict=True)]
    fitting = len(columns)
    while limited and fitting > _LEAST_COLUMNS and sum(widths[:fitting]) + 3 * fitting + 1 > out.width:
        fitting -= 1
    table = Table(title=shown.title, title_justify="left")
    for column, width in zip(columns[:fitting], widths, strict=False):
        table.add_column(column.title, justify="right", no_wrap=True, min_width=width)
    for row in cells:
        table.add_row(*(_cut(cell, width) for cell, width in zip(row[:fitting], widths, strict=False)))
    width = out.width
    out.width = max(width, sum(widths[:fitting]) + 3 * fitting + 1)  # lines are rather wrapped than columns emptied
    out.print(table)
    out.width = width
    if left_out := [column.title.partition("\n")[0] for column in columns[fitting:]]:
        out.print(f"Columns left out at this width: {', '.join(left_out)}. --json prints all.")
    if len(shown.frame) > rows:
        out.print(f"… {len(shown.frame) - rows} more (--rows {len(shown.frame)})")


_MOST_OF_TEXT: Final = 24
"""The widest column of text in a table that would otherwise not fit."""
_LEAST_COLUMNS: Final = 3
"""The columns that are always printed: layer, head and the first number."""


def _cut(cell: str, width: int) -> str:
    return cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1).rstrip()}…"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}".replace("-", "−")
    return str(value).replace("\n", "⏎")


def as_object(summary: Summary, rows: int | None = None) -> dict[str, Any]:
    """The JSON object of a summary (docs/schema/answer.json), with all rows of its table or the first `rows`."""
    columns = summary.table.present
    frame = summary.table.frame[[column.name for column in columns]]
    certificate = summary.model.certificate
    return {
        "version": VERSION,
        "command": summary.command,
        "model": repr(summary.model),
        "certificate": {"ok": certificate.ok, "verdict": certificate.verdict},
        "findings": list(summary.findings),
        "notes": list(summary.notes),
        "table": {
            "title": summary.table.title,
            "units": {column.name: column.unit for column in columns if column.unit},
            "rows": [dict(zip(frame, map(_value, row), strict=True)) for row in frame[:rows].itertuples(index=False)],
            "rows_in_all": len(frame),
        },
        "files": list(summary.files),
        **summary.more,
    }


def _value(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


_OTHER_NAMES: Final = {"inputs": "file", "target": "target_text"}
"""Python's arguments that a command has under another name."""

_CALL: Final = re.compile(r"([\w.]+\([^()]*\))")
"""A call in a message, which stays as it is."""


def as_options(message: str, parameters: Iterable[Any]) -> str:
    """A message in which the arguments that a command has are its options; `parameters` are the command's.

    >>> from types import SimpleNamespace
    >>> as_options("give truncate=True", [SimpleNamespace(name="truncate", opts=["--truncate"])])
    'give --truncate'
    """
    options = {parameter.name: max(parameter.opts, key=len) for parameter in parameters if parameter.opts}
    options |= {python: options[name] for python, name in _OTHER_NAMES.items() if name in options}
    if not options:
        return message
    names = "|".join(map(re.escape, options))
    patterns = (
        rf"`?\b(?P<name>{names})=(?P<value>True|\"[^\"]*\"|'[^']*'|[\w.]*\w)`?",
        rf"`(?P<name>{names})`",
        rf"^(?P<name>{names})(?= must )",
    )
    parts = _CALL.split(message)
    for pattern in patterns:
        parts[::2] = [re.sub(pattern, lambda match: _option(match, options), part) for part in parts[::2]]
    return "".join(parts)


def _option(match: re.Match[str], options: Mapping[str, str]) -> str:
    option, value = options[match["name"]], match.groupdict().get("value")
    if value in (None, "True"):
        return option
    return f"{option} {str(value).strip(chr(34) + chr(39)).removeprefix('torch.')}"
