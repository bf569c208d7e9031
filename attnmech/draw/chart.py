"""A figure with slots for the properties that depend on a choice; Python and a page fill them in the same way.

A `Chart` is a plotly figure in which some properties are left open. A `Slot` names one of these properties and has its
values for every choice of layer, head, rank, query, …; `Chart.figure(layer=2, head=6)` fills them in. A page contains
the figure and the arrays, and page_numbers.js fills the slots when a reader chooses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from .figure import Figure
from .patterns import value_weighted
from .style import NEUTRAL
from .text import signed

OWN_COLOUR: Final = "own colour"  # the name of a shape whose colour does not follow the colour of text

CHOSEN_COLOUR: Final = "#d55e00"
"""The colour of the frame around the selected head's cell, and of marks for the selected token."""


@dataclass(frozen=True, eq=False)
class ByChoice:
    """Values for every choice: the leading axes are choices, and the other axes hold the values of one choice.

    >>> by_head = ByChoice(np.array([[1.0, 2.0], [3.0, 4.0]]), ("layer", "head"))
    >>> by_head.at({"layer": 1, "head": 0})
    array(3.)
    """

    values: np.ndarray  # numbers or strings; missing numbers are NaN, or -1 among integers
    over: tuple[str, ...] = ()  # the names of the choices along the leading axes
    words: tuple[Any, ...] = ()  # if not empty, the values are indices into these
    digits: int | None = None
    """If not None, the values are written with their sign and this many digits after the point."""
    logarithmic: bool = False
    """Whether a page preserves the ratios of the values instead of their differences; 0 then means no value."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Choices that are fixed whatever the reader chooses, such as the head of a figure about one head."""
    blocks: int | None = None
    """The number of equal stretches, each packed with its own scale on a page; by default one stretch per head."""

    @classmethod
    def texts(cls, over: tuple[str, ...], shape: tuple[int, ...], text: Callable[..., str]) -> "ByChoice":
        """A text for every choice: `text` is called with the indices of the choice, such as a layer and a head."""
        values = np.empty(shape, dtype=object)
        for place in np.ndindex(shape):
            values[place] = text(*place)
        return cls(values, over)

    @property
    def follows(self) -> set[str]:
        """The choices that change the values."""
        return set(self.over) - set(self.fixed)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[len(self.over) :]

    @property
    def stretches(self) -> np.ndarray:
        """The values as a page packs them: one row per stretch with its own scale."""
        axes = self.over.index("head") + 1 if "head" in self.over else len(self.over)
        return self.values.reshape(self.blocks or math.prod(self.values.shape[:axes]), -1)

    def at(self, chosen: Mapping[str, int]) -> np.ndarray:
        made = {**chosen, **self.fixed}
        values = np.asarray(self.values[tuple(made[name] for name in self.over)])
        return np.where(values > 0, values, np.nan) if self.logarithmic else values

    def plain(self, value: Any) -> Any:
        """One value as a number; None if it is missing."""
        return value.item() if _is_there(np.asarray(value)) else None

    def written(self, value: Any) -> Any:
        """One value as a figure shows it; None if it is missing."""
        if isinstance(value, str):
            return value
        if not _is_there(np.asarray(value)):
            return None
        if self.words:
            return self.words[int(value)]
        return value.item() if self.digits is None else signed(float(value), f".{self.digits}f")


def of_heads(probabilities: Float[np.ndarray, "layer head ..."]) -> ByChoice:
    """Probabilities by layer and head; a page preserves their ratios, and 0 counts as missing."""
    return ByChoice(probabilities, ("layer", "head"), logarithmic=True)


def with_split(values: np.ndarray, choices: tuple[str, ...], rest: int) -> tuple[str, ...]:
    """The choices along an array's leading axes: `choices`, preceded by "split" if the array has one more axis.

    >>> with_split(np.zeros((2, 5, 8, 3)), ("layer", "head"), rest=1)
    ('split', 'layer', 'head')
    """
    return ("split", *choices) if values.ndim > len(choices) + rest else choices


@dataclass(frozen=True, eq=False)
class Slot:
    """A property of a figure that depends on the reader's choices.

    >>> rows = ByChoice(np.array([[0, 1, 2]]), ("head",), words=("a", "b", "c"))
    >>> marks = ByChoice(np.array([[1, 0, 1]]), ("head",))
    >>> Slot("data.0.x", rows, where=marks, equals=1).value({"head": 0})
    ['a', 'c']
    """

    path: str  # the path of the property in the figure, such as "data.0.z" or "layout.shapes.0.y0"
    values: ByChoice | tuple[ByChoice, ...]  # the property's values; several columns make rows with one entry of each
    less: ByChoice | None = None  # the numbers to subtract from the values: one, or one per row
    where: ByChoice | None = None
    """Selects the entries at which this is `equals` or, if `equals` is None, at which this is not missing."""
    equals: int | None = None
    weights: ByChoice | None = None  # the factors along the last axis; each row is then divided by its sum

    @property
    def columns(self) -> tuple[ByChoice, ...]:
        """The values as a tuple of one or more columns."""
        return self.values if isinstance(self.values, tuple) else (self.values,)

    @property
    def follows(self) -> set[str]:
        return set().union(*(values.follows for values in self.arrays))

    @property
    def arrays(self) -> list[ByChoice]:
        return [*self.columns, *(values for values in (self.less, self.where, self.weights) if values is not None)]

    def value(self, chosen: Mapping[str, int]) -> Any:
        columns = [self._column(values, chosen) for values in self.columns]
        return [list(row) for row in zip(*columns, strict=True)] if len(columns) > 1 else columns[0]

    def _column(self, column: ByChoice, chosen: Mapping[str, int]) -> Any:
        values = column.at(chosen)
        if self.weights is not None:
            shares = value_weighted(np.nan_to_num(values), np.nan_to_num(self.weights.at(chosen)))
            values = np.where(np.isnan(values), np.nan, shares)
        if self.less is not None:
            less = self.less.at(chosen)
            values = values - less.reshape(*less.shape, *(1,) * (values.ndim - less.ndim))
        if self.where is not None:
            codes = self.where.at(chosen)
            values = values[_is_there(codes) if self.equals is None else codes == self.equals]
        return _nested(values, column)


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure with its slots, and the choices that a click on a point makes."""

    template: go.Figure
    slots: tuple[Slot, ...]
    clicks: Mapping[str, str] = field(default_factory=dict)
    """The property of a clicked point that gives each choice, such as "y", "customdata.0" or "data.meta"."""

    @property
    def follows(self) -> set[str]:
        return set().union(*(slot.follows for slot in self.slots))

    def figure(self, **chosen: int) -> go.Figure:
        """The figure for this choice; choices count from 0."""
        return Figure(self.values(**chosen))

    def values(self, **chosen: int) -> dict[str, Any]:
        """The properties of the figure for this choice, which plotly has not checked."""
        filled: dict[str, Any] = self.template.to_plotly_json()
        for slot in self.slots:
            *way, last = (int(step) if step.isdigit() else step for step in slot.path.split("."))
            place: Any = filled
            for step in way:
                place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
            place[last] = slot.value(chosen)
        return filled


def heads_of_map(figure: go.Figure) -> int:
    """The number of columns of a map of layers × heads, which may have several traces."""
    return 1 + max(int(head) for trace in figure.data for head in trace.x)


def at_head(figure: go.Figure, layers_of_map: tuple[int, ...], layers: tuple[int, ...]) -> Chart:
    """A map of layers × heads with a frame around the selected head's cell; a click on a cell selects its head.

    `figure` has a row for each of `layers_of_map`, and [layer, head] as `customdata` of a cell. The `layers` that can
    be chosen may be others.
    """
    heads = np.arange(heads_of_map(figure), dtype=np.float64)
    rows = np.array([layers_of_map.index(layer) if layer in layers_of_map else -1 for layer in layers])
    frame = {"type": "rect", "name": OWN_COLOUR, "line": {"width": 3, "color": CHOSEN_COLOUR}}
    framed = Figure(figure).update_layout(shapes=[frame | {"x0": -0.5, "x1": 0.5, "y0": -0.5, "y1": 0.5}])
    shape = "layout.shapes.0"
    return Chart(
        framed,
        (
            Slot(f"{shape}.x0", ByChoice(heads - 0.5, ("head",))),
            Slot(f"{shape}.x1", ByChoice(heads + 0.5, ("head",))),
            Slot(f"{shape}.y0", ByChoice(rows - 0.5, ("layer",))),
            Slot(f"{shape}.y1", ByChoice(rows + 0.5, ("layer",))),
            Slot(f"{shape}.visible", ByChoice((rows >= 0).astype(int), ("layer",), words=(False, True))),
        ),
        clicks={"layer": "customdata.0", "head": "customdata.1"},
    )


def table_of_heads(columns: Mapping[str, Sequence[Sequence[Sequence[str]]]], height: int) -> Chart:
    """A table for each layer and head; each column has a text for each layer, head and row."""
    figure = Figure()
    figure.add_table(header={"values": list(columns)}, cells={"values": [[] for _ in columns]})
    figure.update_layout(height=height)
    texts = [ByChoice(np.array(column, dtype=object), ("layer", "head")) for column in columns.values()]
    return Chart(figure, tuple(Slot(f"data.0.cells.values.{place}", column) for place, column in enumerate(texts)))


def row_frame(rows: int) -> tuple[dict[str, object], tuple[Slot, ...]]:
    """A frame around the selected query's row, and its slots; the frame is the figure's only shape."""
    places = np.arange(rows, dtype=np.float64)
    frame = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": NEUTRAL, "width": 1.5}}
    return frame, (
        Slot("layout.shapes.0.y0", ByChoice(places - 0.5, ("query",))),
        Slot("layout.shapes.0.y1", ByChoice(places + 0.5, ("query",))),
    )


def token_axis(labels: list[str], title: str, *, downwards: bool = False) -> dict[str, object]:
    """An axis with one category per token; plotly drops labels that do not fit."""
    ends = [-0.5, len(labels) - 0.5]
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": labels,
        "range": ends[::-1] if downwards else ends,
        "title": {"text": title},
        "tickfont": {"size": 11},
    }


def height_of_rows(rows: int) -> int:
    """The height in pixels of a plot with one row per token: 14 per row, but from 250 to 800."""
    return int(np.clip(14 * rows, 250, 800))


def _is_there(values: np.ndarray) -> np.ndarray:
    """True for values that are not missing: integers from 0 on, and finite numbers."""
    return np.asarray(values >= 0 if values.dtype.kind in "iu" else np.isfinite(values))


def _nested(values: np.ndarray, column: ByChoice) -> Any:
    """The values as a figure holds them: numbers as an array, words in lists."""
    if values.ndim == 0:
        return column.written(values[()])
    if values.dtype.kind == "f" and not column.words and column.digits is None:
        return values
    return [_nested(np.asarray(part), column) for part in values]
