"""The figure of a confirmation: estimates against exact effects."""

from collections.abc import Mapping
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS

COLOURS: Final[Mapping[bool, tuple[str, str]]] = {
    False: ("strongest", SCORE_COLOURS[-1]),
    True: ("controls", NEUTRAL),
}
"""The name and colour of nodes, by whether they are controls."""


def confirmed(frame: pd.DataFrame) -> go.Figure:
    """Draws the exact effect of each node in `Confirmation.to_frame` over its estimate, with the line of equality."""
    figure = Figure()
    ends = [float(frame[["estimate", "exact"]].min().min()), float(frame[["estimate", "exact"]].max().max())]
    line = {"color": NEUTRAL, "width": 1, "dash": "dot"}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, name="exact = estimate", hoverinfo="skip")
    for control, (name, colour) in COLOURS.items():
        some = frame[frame["control"] == control]
        figure.add_scatter(
            x=some["estimate"],
            y=some["exact"],
            error_y={
                "array": some["exact_high"] - some["exact"],
                "arrayminus": some["exact"] - some["exact_low"],
                "thickness": 1,
            },
            mode="markers",
            marker={"color": colour, "size": 7},
            name=name,
            text=some["node"],
            hovertemplate="%{text}<br>estimate %{x:.3g}<br>exact %{y:.3g}<extra></extra>",
        )
    figure.update_layout(template=FIGURE_STYLE, height=340)
    figure.update_xaxes(title="estimate")
    figure.update_yaxes(title="exact effect")
    return figure
