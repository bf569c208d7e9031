"""Layers × heads as a map of signed effects."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

from attnmech.arguments import listed, string
from attnmech.draw.figure import Figure
from attnmech.draw.patterns import as_array
from attnmech.draw.style import FIGURE_STYLE
from attnmech.draw.text import signed, token_labels
from attnmech.errors import InputError

SIGNED_COLOURS: Final = ["#8c5109", "#cf9a4f", "#e3e3e3", "#6f9cc1", "#1f4a73"]
"""Below zero brown, above zero blue, zero light grey: distinguishable by colour-blind readers, and by lightness."""

PALE: Final = 0.3
"""The opacity of effects that are not clear."""


def effect_map(
    effect: NDArray[np.floating],
    low: NDArray[np.floating],
    high: NDArray[np.floating],
    *,
    layers: Sequence[int],
    label: str,
    columns: str = "head",
    tokens: Sequence[str] = (),
    clear: NDArray[np.bool_] | None = None,
) -> go.Figure:
    """One cell per head, coloured by its effect, on a scale centred on zero; grey where none was measured.

    `effect`, `low`, `high` are `[layer head]`; intervals that are NaN are not shown in the hover. `clear` says which
    effects are distinguishable from 0 among all of them; the others are pale. `tokens` label the columns if these are
    positions.
    """
    effect, low, high = (as_array(each, np.float64) for each in (effect, low, high))
    rows = listed("layers", layers, "a list of ints")
    if effect.ndim != 2 or low.shape != effect.shape or high.shape != effect.shape or len(rows) != len(effect):
        raise InputError(
            f"`effect`, `low` and `high` must be [layer {columns}] of {len(rows)} layers; got the shapes "
            f"{effect.shape}, {low.shape} and {high.shape}."
        )
    string("label", label)
    known = np.abs(effect[np.isfinite(effect)])
    reach = float(known.max()) if known.size and known.max() > 0 else 1.0
    names = token_labels(tokens) if tokens else [str(column) for column in range(effect.shape[1])]
    told = np.full(effect.shape, "") if clear is None else np.where(clear, "<br>clear", "<br>not clear")
    hover = [
        [_hover(_place(layer, columns, name), *values) for name, *values in zip(names, *row, strict=True)]
        for layer, row in zip(layers, zip(effect, low, high, told, strict=True), strict=True)
    ]
    shown = np.ones(effect.shape, dtype=bool) if clear is None else clear
    figure = Figure()
    for some, opacity in [(shown, 1.0)] if clear is None else [(~shown, PALE), (shown, 1.0)]:
        figure.add_heatmap(
            z=np.where(some, effect, np.nan),
            x=list(range(effect.shape[1])),
            y=[str(layer) for layer in layers],
            coloraxis="coloraxis",
            opacity=opacity,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=clear is None,
            customdata=[[[layer, column] for column in range(effect.shape[1])] for layer in layers],
            xgap=1,
            ygap=1,
        )
    bar = {"title": {"text": label, "side": "right"}, "thickness": 12}
    scale = {"cmin": -reach, "cmax": reach, "colorscale": SIGNED_COLOURS, "colorbar": bar}
    figure.update_layout(template=FIGURE_STYLE, height=max(240, 110 + 24 * len(layers)), coloraxis=scale)
    figure.update_xaxes(title=columns, dtick=1 if effect.shape[1] <= 32 else None, showgrid=False)
    if tokens:
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
    figure.update_yaxes(title="layer", autorange="reversed", type="category", showgrid=False)
    return figure


def _place(layer: int, columns: str, name: str) -> str:
    return f"L{layer}H{name}" if columns == "head" else f"layer {layer}, {columns} {name}"


def _hover(place: str, effect: float, low: float, high: float, clear: str) -> str:
    if not np.isfinite(effect):
        return f"{place}<br>not measured"
    found = f"{place}<br>{signed(effect, '.4g')}"
    if not (np.isfinite(low) and np.isfinite(high)):
        return found
    return f"{found}<br>95 %: {signed(low, '.3g')} to {signed(high, '.3g')}{clear}"
