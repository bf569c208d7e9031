"""A figure with slots for what depends on a choice, filled in the same way by Python and by a page.

A `Chart` is a plotly figure in which some properties are left open. A `Slot` names such a property and holds its values
for every choice of layer, head, rank, query, …; `Chart.figure(layer=2, head=6)` fills them in. A page carries the
figure and the arrays, and page.js fills them in when a reader chooses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from .figure import Figure
from .patterns import value_weighted
from .style import NEUTRAL
from .text import signed

OWN_COLOUR: Final = "own colour"
"""The name of a shape whose colour does not follow the text's."""

CHOSEN_COLOUR: Final = "#d55e00"
"""The frame around the chosen head's cell, and what belongs to the chosen token."""


@dataclass(frozen=True, eq=False)
class ByChoice:
    """Values for everything that can be chosen: the leading axes are choices, the rest is what a choice gives.

    >>> by_head = ByChoice(np.array([[1.0, 2.0], [3.0, 4.0]]), ("layer", "head"))
    >>> by_head.at({"layer": 1, "head": 0})
    array(3.)
    """

    values: np.ndarray
    """Numbers (NaN, or -1 of integers, where there is none), or strings."""
    over: tuple[str, ...] = ()
    """The names of the choices that its leading axes stand for."""
    words: tuple[Any, ...] = ()
    """If there are any, the values are indices into these."""
    digits: int | None = None
    """If given, the values are written with their sign and this many digits after the point."""
    logarithmic: bool = False
    """Whether a page keeps their ratios instead of their differences; then 0 means no value."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Choices that are made already: what belongs to one head, whichever is chosen."""
    blocks: int | None = None
    """Into how many stretches of equal length a page cuts it, each scaled by itself; by default one for each head."""

    @classmethod
    def texts(cls, over: tuple[str, ...], shape: tuple[int, ...], text: Callable[..., str]) -> "ByChoice":
        """A text for every choice: `text` is called with the place of each, say a layer and a head."""
        values = np.empty(shape, dtype=object)
        for place in np.ndindex(shape):
            values[place] = text(*place)
        return cls(values, over)

    @property
    def follows(self) -> set[str]:
        """The choices that change what it gives."""
        return set(self.over) - set(self.fixed)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what one choice gives."""
        return self.values.shape[len(self.over) :]

    @property
    def stretches(self) -> np.ndarray:
        """The values as a page packs them: a row for each stretch that is scaled by itself."""
        axes = self.over.index("head") + 1 if "head" in self.over else len(self.over)
        return self.values.reshape(self.blocks or math.prod(self.values.shape[:axes]), -1)

    def at(self, chosen: Mapping[str, int]) -> np.ndarray:
        """What this choice gives."""
        made = {**chosen, **self.fixed}
        values = np.asarray(self.values[tuple(made[name] for name in self.over)])
        return np.where(values > 0, values, np.nan) if self.logarithmic else values

    def plain(self, value: Any) -> Any:
        """One value as a number; None where there is none."""
        return value.item() if _is_there(np.asarray(value)) else None

    def written(self, value: Any) -> Any:
        """One value as it stands in a figure; None where there is none."""
        if isinstance(value, str):
            return value
        if not _is_there(np.asarray(value)):
            return None
        if self.words:
            return self.words[int(value)]
        return value.item() if self.digits is None else signed(float(value), f".{self.digits}f")


def of_heads(probabilities: Float[np.ndarray, "layer head ..."]) -> ByChoice:
    """Probabilities by layer and head, of which a page keeps the ratios; 0 is none."""
    return ByChoice(probabilities, ("layer", "head"), logarithmic=True)


def with_split(values: np.ndarray, choices: tuple[str, ...], rest: int) -> tuple[str, ...]:
    """The choices that an array's leading axes stand for: `choices`, after "split" if it has one axis more.

    >>> with_split(np.zeros((2, 5, 8, 3)), ("layer", "head"), rest=1)
    ('split', 'layer', 'head')
    """
    return ("split", *choices) if values.ndim > len(choices) + rest else choices


@dataclass(frozen=True, eq=False)
class Slot:
    """A property of a figure that depends on what is chosen.

    >>> rows = ByChoice(np.array([[0, 1, 2]]), ("head",), words=("a", "b", "c"))
    >>> marks = ByChoice(np.array([[1, 0, 1]]), ("head",))
    >>> Slot("data.0.x", rows, where=marks, equals=1).value({"head": 0})
    ['a', 'c']
    """

    path: str
    """Where it stands: "data.0.z", "layout.shapes.0.y0"."""
    values: ByChoice | tuple[ByChoice, ...]
    """What stands there; of several, rows with one entry of each."""
    less: ByChoice | None = None
    """What is subtracted: one number, or one for each row."""
    where: ByChoice | None = None
    """Which entries are kept: those for which this is `equals`, or a number at all."""
    equals: int | None = None
    weights: ByChoice | None = None
    """What the last axis is multiplied by; each row is then divided by its sum."""

    @property
    def columns(self) -> tuple[ByChoice, ...]:
        """Its values, one column or several."""
        return self.values if isinstance(self.values, tuple) else (self.values,)

    @property
    def follows(self) -> set[str]:
        """The choices on which it depends."""
        return set().union(*(values.follows for values in self.arrays))

    @property
    def arrays(self) -> list[ByChoice]:
        """All that it reads."""
        return [*self.columns, *(values for values in (self.less, self.where, self.weights) if values is not None)]

    def value(self, chosen: Mapping[str, int]) -> Any:
        """What stands there once this is chosen."""
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
    """A figure with its slots, and what a click on one of its points chooses."""

    template: go.Figure
    slots: tuple[Slot, ...]
    clicks: Mapping[str, str] = field(default_factory=dict)
    """By the name of a choice, the property of a point that says it: "y", "customdata.0", "data.meta"."""

    @property
    def follows(self) -> set[str]:
        """The choices on which the figure depends."""
        return set().union(*(slot.follows for slot in self.slots))

    def figure(self, **chosen: int) -> go.Figure:
        """The figure for this choice; choices count from 0."""
        filled = self.template.to_plotly_json()
        for slot in self.slots:
            *way, last = (int(step) if step.isdigit() else step for step in slot.path.split("."))
            place: Any = filled
            for step in way:
                place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
            place[last] = slot.value(chosen)
        return Figure(filled)


def at_head(figure: go.Figure, layers_of_map: tuple[int, ...], layers: tuple[int, ...]) -> Chart:
    """A map of layers × heads whose cell of the chosen head has a frame; a click on a cell chooses its head.

    Args:
        figure: heat maps with a column for each head and a row for each of `layers_of_map`; `customdata` of a cell is
            [layer, head].
        layers_of_map: the labels of its rows.
        layers: the layers that can be chosen, perhaps others.

    """
    heads = np.arange(len(figure.data[0].x), dtype=np.float64)
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


def row_frame(rows: int) -> tuple[dict[str, object], tuple[Slot, ...]]:
    """A frame around the row of the chosen query, and its slots as the figure's only shape."""
    places = np.arange(rows, dtype=np.float64)
    frame = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": NEUTRAL, "width": 1.5}}
    return frame, (
        Slot("layout.shapes.0.y0", ByChoice(places - 0.5, ("query",))),
        Slot("layout.shapes.0.y1", ByChoice(places + 0.5, ("query",))),
    )


def token_axis(labels: list[str], title: str, *, downwards: bool = False) -> dict[str, object]:
    """An axis with one category per token: plotly thins out its labels to fit the room there is."""
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
    """Pixels for the area of a figure with one row per token: some 14 per row, within what fits a screen."""
    return int(np.clip(14 * rows, 250, 800))


def _is_there(values: np.ndarray) -> np.ndarray:
    """Which values are there: integers from 0 on, and numbers that are not NaN."""
    return np.asarray(values >= 0 if values.dtype.kind in "iu" else np.isfinite(values))


def _nested(values: np.ndarray, column: ByChoice) -> Any:
    """The values as a figure holds them: numbers as an array, words in lists."""
    if values.ndim == 0:
        return column.written(values[()])
    if values.dtype.kind == "f" and not column.words and column.digits is None:
        return values
    return [_nested(np.asarray(part), column) for part in values]
