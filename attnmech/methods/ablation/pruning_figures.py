"""The figure of a metric as heads are removed one after another."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, MARKS, NEUTRAL

_CURVE: Final = MARKS["self"]


def pruning_lines(
    steps: Sequence[str],
    curve: NDArray[np.floating],
    low: NDArray[np.floating],
    high: NDArray[np.floating],
    random: NDArray[np.floating],
    *,
    label: str,
) -> go.Figure:
    """Draws the metric after each step, `[step]`, with its interval as a band, and random orders, `[draw step]`.

    `steps` names the head removed at each step; at the first, no head is removed.
    """
    places = list(range(len(steps)))
    figure = Figure()
    for number, draw in enumerate(random):
        figure.add_scatter(
            x=places, y=draw, mode="lines", name="in random order", legendgroup="random", showlegend=number == 0,
            line={"color": NEUTRAL, "width": 1, "dash": "dot"},
            hovertemplate=f"%{{x}} heads removed, random order {number}<br>%{{y:.4g}}<extra></extra>",
        )  # fmt: skip
    if np.isfinite(low).any():
        figure.add_scatter(
            x=[*places, *reversed(places)], y=[*high, *low[::-1]], fill="toself", mode="lines", line={"width": 0},
            fillcolor="rgba(0,158,115,0.2)", name="95 % over texts", hoverinfo="skip",
        )  # fmt: skip
    figure.add_scatter(
        x=places, y=curve, mode="lines+markers", name="least harmful first",
        line={"color": _CURVE.colour, "width": 2}, marker={"symbol": _CURVE.symbol, "size": 6}, text=list(steps),
        hovertemplate="%{x} heads removed, last %{text}<br>%{y:.4g}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=360)
    figure.update_xaxes(title="heads removed")
    figure.update_yaxes(title=label)
    return figure
