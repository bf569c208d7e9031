"""Numbers with their intervals: rows of signed numbers, and error bars."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .figure import Figure
from .style import FIGURE_STYLE, MARKS, NEUTRAL

_STYLES: Final = tuple(MARKS.values())


def interval_rows(
    rows: Sequence[str],
    values: Sequence[tuple[str, NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]]],
    *,
    label: str,
) -> go.Figure:
    """Draws one row per name, with a mark for each of up to three quantities (name, value, low, high).

    Each quantity has its own colour and symbol; the line through a mark is its interval, if known.
    """
    figure = Figure()
    for number, (name, value, low, high) in enumerate(values):
        style = _STYLES[number]
        figure.add_scatter(
            x=value,
            y=[row + 0.22 * (number - (len(values) - 1) / 2) for row in range(len(rows))],
            mode="markers",
            name=name,
            marker={"color": style.colour, "symbol": style.symbol, "size": 8},
            error_x={
                "type": "data",
                "array": np.nan_to_num(high - value),
                "arrayminus": np.nan_to_num(value - low),
                "thickness": 1.2,
                "width": 0,
            },
            text=[f"{row}<br>{name}" for row in rows],
            hovertemplate="%{text}: %{x:+.4g}<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": NEUTRAL, "width": 1})
    figure.update_layout(template=FIGURE_STYLE, height=max(180, 90 + 34 * len(rows)))
    figure.update_xaxes(title=label)
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=list(rows), range=[len(rows) - 0.5, -0.5])
    return figure


def error_bars(frame: pd.DataFrame, name: str) -> dict[str, Any]:
    value, low, high = (frame[f"{name}{end}"] for end in ("", "_low", "_high"))
    return {"array": high - value, "arrayminus": value - low, "thickness": 1}
