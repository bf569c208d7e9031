"""Maps of layers × heads, or of other rows and columns, coloured by any number: effects, shares, scores."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from numpy.typing import NDArray

from ..basics.arguments import listed, string
from ..basics.public import public
from ..errors import InputError
from .figure import Figure
from .patterns import as_array
from .style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from .text import signed as with_sign
from .text import token_labels

SIGNED_COLOURS: Final = ["#8c5109", "#cf9a4f", "#e3e3e3", "#6f9cc1", "#1f4a73"]
"""Brown below zero, blue above, grey at zero; they also differ in lightness, for colour-blind readers."""


def reach_of(values: Float[np.ndarray, "..."]) -> float:
    """The largest absolute value, at which a scale of colours ends; 1 if there is none above 0.

    >>> reach_of(np.array([0.5, -2.0, np.nan])), reach_of(np.zeros(2))
    (2.0, 1.0)
    """
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0


def cell_map(
    values: Float[np.ndarray, "row column"],
    hover: Callable[[int, int], str],
    label: str,
    *,
    ends: tuple[float, float] | None = None,
    signed: bool = False,
    gap: int = 1,
    x: Sequence[str] | None = None,
    y: Sequence[str] | None = None,
) -> go.Figure:
    """Draws the cells, the first row on top; cells that are NaN stay empty.

    `hover` makes the box of a cell, by its row and column; `label` is the title of the scale of colours. `ends` are the
    numbers at its first and last colour: by default 0, or if `signed` the negative, and the largest absolute value. `x`
    and `y` name columns and rows, by default by their numbers.
    """
    rows, columns = map(range, values.shape)
    reach = reach_of(values)
    low, high = (-reach if signed else 0.0, reach) if ends is None else ends
    figure = Figure()
    figure.add_heatmap(
        z=values, x=list(x or columns), y=list(y or rows), zmin=low, zmax=high,
        colorscale=SIGNED_COLOURS if signed else SCORE_COLOURS,
        colorbar={"title": {"text": label, "side": "right"}, "thickness": 12},
        text=[[hover(row, column) for column in columns] for row in rows],
        hovertemplate="%{text}<extra></extra>", hoverongaps=False, xgap=gap, ygap=gap,
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


PALE: Final = 0.3  # the opacity of effects that are not clear


@public
def effect_map(
    effect: Any,
    low: Any = None,
    high: Any = None,
    *,
    layers: Sequence[int] | None = None,
    label: str = "",
    title: str = "",
    columns: str = "head",
    tokens: Sequence[str] = (),
    clear: NDArray[np.bool_] | None = None,
    signed: bool | None = None,
) -> go.Figure:
    """Draws layers × heads, one cell per head, coloured by any number; NaN is shown as a cross.

    >>> figure = effect_map([[0.1, 0.9], [float("nan"), 0.3]], label="share of rows")
    >>> figure.layout.coloraxis.cmin, figure.data[-1].name
    (0.0, 'not measured')

    Args:
        effect: [layer head], as a numpy array, a tensor, or lists; a table with a row per layer and a column per
            head; or a table with the columns `layer`, `head` and one of numbers, such as
            `focus.to_frame()[["layer", "head", "entropy"]]`.
        low: the lower end of each number's interval, shown in the hover box of a cell; NaN without an interval.
        high: the upper end.
        layers: the labels of the layers; by default the table's index, or numbers from 0.
        label: the name and unit of the numbers, beside the colours.
        title: the line above the map.
        columns: the name of the columns, if they are not heads.
        tokens: labels of the columns if these are positions.
        clear: True for numbers that are distinguishable from 0 among all of them; the others are pale.
        signed: True for colours centred on zero, with one hue above and another below; False for one hue that rises
            from zero. By default True if a number is below zero.

    Returns:
        The figure; `customdata` of a cell is [layer, column].

    Raises:
        InputError: for anything that is not [layer head], or without a label for each layer.

    """
    effect, rows = _by_layer(effect, layers)
    low, high = (np.full(effect.shape, np.nan) if end is None else as_array(end, np.float64) for end in (low, high))
    if effect.ndim != 2 or low.shape != effect.shape or high.shape != effect.shape or len(rows) != len(effect):
        raise InputError(
            f"`effect`, `low` and `high` must be [layer {columns}] of {len(rows)} layers; got the shapes "
            f"{effect.shape}, {low.shape} and {high.shape}."
        )
    string("label", label)
    string("title", title)
    names = token_labels(tokens) if tokens else [str(column) for column in range(effect.shape[1])]
    verdicts = np.full(effect.shape, "") if clear is None else np.where(clear, "<br>clear", "<br>not clear")
    hover = [
        [_hover(_place(layer, columns, name), *values) for name, *values in zip(names, *row, strict=True)]
        for layer, row in zip(rows, zip(effect, low, high, verdicts, strict=True), strict=True)
    ]
    shown = np.ones(effect.shape, dtype=bool) if clear is None else clear
    figure = Figure()
    for some, opacity in [(shown, 1.0)] if clear is None else [(~shown, PALE), (shown, 1.0)]:
        figure.add_heatmap(
            z=np.where(some, effect, np.nan),
            x=list(range(effect.shape[1])),
            y=[str(layer) for layer in rows],
            coloraxis="coloraxis",
            opacity=opacity,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=clear is None,
            customdata=[[[layer, column] for column in range(effect.shape[1])] for layer in rows],
            xgap=1,
            ygap=1,
        )
    missing = np.argwhere(~np.isfinite(effect))
    if len(missing):
        figure.add_scatter(
            x=missing[:, 1].tolist(),
            y=[str(rows[row]) for row in missing[:, 0]],
            mode="markers",
            marker={"symbol": "x-thin", "size": 7, "line": {"color": NEUTRAL, "width": 1}},
            name="not measured",
            showlegend=False,
            hoverinfo="skip",
        )
    bar = {"title": {"text": label, "side": "right"}, "thickness": 12}
    reach = reach_of(effect)
    below = bool((effect[np.isfinite(effect)] < 0).any()) if signed is None else signed
    colours = SIGNED_COLOURS if below else SCORE_COLOURS
    scale = {"cmin": -reach if below else 0.0, "cmax": reach, "colorscale": colours, "colorbar": bar}
    figure.update_layout(template=FIGURE_STYLE, height=max(240, 110 + 24 * len(rows)), coloraxis=scale)
    if title:
        heading = {
            "text": title,
            "font": {"size": 13},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 10},
        }
        figure.update_layout(title=heading, margin_t=36)
    figure.update_xaxes(title=columns, dtick=1 if effect.shape[1] <= 32 else None, showgrid=False)
    if tokens:
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
    figure.update_yaxes(title="layer", autorange="reversed", type="category", showgrid=False)
    return figure


def _by_layer(effect: Any, layers: Sequence[int] | None) -> tuple[NDArray[np.float64], list[Any]]:
    """The numbers as an array, and the labels of its rows."""
    if isinstance(effect, pd.DataFrame):
        if {"layer", "head"} <= set(effect.columns):
            values = [name for name in effect.columns if name not in ("layer", "head")]
            if len(values) != 1:
                raise InputError(
                    "a table must have the columns layer, head and one column of values; its value columns are "
                    f"{', '.join(map(str, values)) or 'none'}. Select one: frame[['layer', 'head', 'entropy']]."
                )
            if effect.duplicated(["layer", "head"]).any():
                raise InputError("a table must have one row per layer and head; got duplicates.")
            effect = effect.pivot(index="layer", columns="head", values=values[0])
        layers = list(effect.index) if layers is None else layers
        effect = effect.to_numpy()
    array = as_array(effect, np.float64)
    return array, list(range(len(array) if array.ndim else 0)) if layers is None else listed(
        "layers", layers, "a list of ints"
    )


def _place(layer: int, columns: str, name: str) -> str:
    return f"L{layer}H{name}" if columns == "head" else f"layer {layer}, {columns} {name}"


def _hover(place: str, effect: float, low: float, high: float, clear: str) -> str:
    if not np.isfinite(effect):
        return f"{place}<br>not measured"
    text = f"{place}<br>{with_sign(effect, '.4g')}"
    if not (np.isfinite(low) and np.isfinite(high)):
        return text
    return f"{text}<br>95 %: {with_sign(low, '.3g')} to {with_sign(high, '.3g')}{clear}"
