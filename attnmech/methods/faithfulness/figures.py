"""The figure of faithfulness: the curve over sizes of circuits."""

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS


def faithfulness_curve(frame: pd.DataFrame) -> go.Figure:
    """Draws faithfulness and completeness in `Faithfulness.to_frame` over the share of edges, with intervals."""
    figure = Figure()
    kinds = {"faithfulness": ("only the circuit", "circle"), "completeness": ("everything but the circuit", "square")}
    for (name, (label, symbol)), colour in zip(kinds.items(), (SCORE_COLOURS[-1], NEUTRAL), strict=True):
        figure.add_scatter(
            x=100 * frame["share"],
            y=frame[name],
            error_y={
                "array": frame[f"{name}_high"] - frame[name],
                "arrayminus": frame[name] - frame[f"{name}_low"],
                "thickness": 1,
            },
            mode="lines+markers",
            line={"color": colour, "dash": "solid" if name == "faithfulness" else "dot"},
            marker={"color": colour, "symbol": symbol, "size": 7},
            name=label,
            text=frame["size"],
            hovertemplate=f"{label}: %{{y:.3g}}<br>%{{text}} edges (%{{x:.3g}} %)<extra></extra>",
        )
    for level in (0, 1):
        figure.add_hline(y=level, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    figure.update_layout(template=FIGURE_STYLE, height=360)
    figure.update_xaxes(title="edges in the circuit (%)", type="log")
    figure.update_yaxes(title="share of the metric kept")
    return figure
