"""What does a command print? Lines for a reader, tables cut with what was left out, or the same as JSON.

Neither torch nor transformers is imported.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import pandas as pd

    from ..maths.statistic import Statistic


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    """In the frame."""
    heading: str = ""
    """If not the name with spaces."""
    unit: str = ""

    @property
    def shown(self) -> str:
        """The heading with its unit below."""
        heading = self.heading or self.name.replace("_", " ")
        return f"{heading}\n({self.unit})" if self.unit else heading


def columns_of(statistics: "Iterable[Statistic]") -> list[Column]:
    """The columns of statistics, under their names and units."""
    return [Column(each.name, each.title, each.unit) for each in statistics]


@dataclass(frozen=True)
class Rows:
    """A table to be printed: all its rows, the most telling first."""

    title: str
    """What the rows are, and by what they are sorted."""
    frame: "pd.DataFrame"
    columns: Sequence[Column]

    @property
    def known(self) -> Sequence[Column]:
        """The columns that hold a number or a word."""
        return [each for each in self.columns if each.name in self.frame and not self.frame[each.name].isna().all()]


@dataclass(frozen=True)
class Said:
    """What a command has to say."""

    model: str
    finding: str
    table: Rows | None = None
    lines: Sequence[str] = ()
    """More findings."""
    notes: Sequence[str] = ()
    """What was cut or left out."""
    files: Sequence[str] = ()
    """What was written."""
    more: dict[str, Any] = field(default_factory=dict)
    """Entries of the JSON alone."""


def say(said: Said, *, rows: int, as_json: bool) -> None:
    """Prints it, with up to `rows` rows of the table."""
    if as_json:
        print(json.dumps(_json(said), ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    for line in (said.model, said.finding, *said.lines):
        console.print(plain(line), soft_wrap=True, highlight=False)
    if said.table is not None:
        print_rows(console, said.table, rows)
    for note in said.notes:
        console.print(plain(note), highlight=False)
    if said.files:
        first, *others = said.files
        named = " and ".join(f"[bold]{plain(name)}[/bold]" for name in (first, *(Path(each).name for each in others)))
        console.print(f"\n{named}", soft_wrap=True)


def print_rows(console: Console, shown: Rows, rows: int) -> None:
    """The first `rows` rows, units in the headings, and how many rows are left out."""
    if not rows:
        return
    table = Table(title=shown.title, title_justify="left")
    for column in shown.known:
        table.add_column(column.shown, justify="right", no_wrap=True)
    for row in shown.frame.head(rows)[[column.name for column in shown.known]].itertuples(index=False):
        table.add_row(*map(_cell, row))
    console.print(table)
    if len(shown.frame) > rows:
        console.print(f"… {len(shown.frame) - rows} more (--rows {len(shown.frame)})", highlight=False)


def plain(text: str) -> str:
    """Text with rich's markup escaped: a model's name may hold anything."""
    return text.replace("[", "\\[")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}".replace("-", "−")
    return plain(str(value))


def _json(said: Said) -> dict[str, Any]:
    found: dict[str, Any] = {"model": said.model, "findings": [said.finding, *said.lines], "notes": list(said.notes)}
    if said.table is not None:
        frame = said.table.frame[[each.name for each in said.table.known]]
        found["table"] = {
            "title": said.table.title,
            "units": {each.name: each.unit for each in said.table.known if each.unit},
            "rows": [dict(zip(frame, map(_value, row), strict=True)) for row in frame.itertuples(index=False)],
        }
    return found | {"files": list(said.files)} | said.more


def _value(value: Any) -> Any:
    """A cell as a JSON value."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
