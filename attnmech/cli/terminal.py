"""Prints a command's summary: lines and the first rows of a table, or everything as one JSON object.

Neither torch nor transformers is imported.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

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
        """The columns that the frame has."""
        return [column for column in self.columns if column.name in self.frame]


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
    """The files written."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON object."""


def print_summary(summary: Summary, *, rows: int, as_json: bool) -> None:
    """Prints a summary with the first `rows` rows of its table, or as JSON with all rows."""
    if as_json:
        print(json.dumps(as_object(summary), ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    for line in (repr(summary.model), *summary.findings):
        console.print(plain(line), soft_wrap=True, highlight=False)
    print_rows(console, summary.table, rows)
    for note in summary.notes:
        console.print(plain(note), highlight=False)
    if summary.files:
        print_files(console, summary.files)


def print_files(console: Console, files: Sequence[str]) -> None:
    """Prints the files written: the first with its folder, others in the same folder by name only."""
    folder = Path(files[0]).parent
    names = (Path(file).name if place and Path(file).parent == folder else file for place, file in enumerate(files))
    listed = " and ".join(f"[bold]{plain(name)}[/bold]" for name in names)
    console.print(f"\n{listed}", soft_wrap=True)


def print_rows(console: Console, shown: Rows, rows: int) -> None:
    """Prints the first `rows` rows with units in the headings, and how many rows are left out."""
    if not rows:
        return
    columns = [column for column in shown.present if not shown.frame[column.name].isna().all()]
    table = Table(title=shown.title, title_justify="left")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in shown.frame.head(rows)[[column.name for column in columns]].itertuples(index=False):
        table.add_row(*map(_cell, row))
    console.print(table)
    if len(shown.frame) > rows:
        console.print(f"… {len(shown.frame) - rows} more (--rows {len(shown.frame)})", highlight=False)


def plain(text: str) -> str:
    """Escapes rich's markup, because a model's name may contain any characters."""
    return text.replace("[", "\\[")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}".replace("-", "−")
    return plain(str(value))


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
    """Returns a cell as a JSON value."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
