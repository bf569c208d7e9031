"""The figures of steering: what layers separate, and dose curves."""

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.intervals import error_bars
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS


def separation(frame: pd.DataFrame) -> go.Figure:
    """Draws the share of held-out texts on the right side over layers, from `MeanDifference.to_frame`."""
    figure = Figure()
    figure.add_scatter(
        x=frame["layer"], y=frame["separated"], error_y=error_bars(frame, "separated"), mode="lines+markers",
        line={"color": SCORE_COLOURS[-1]}, hovertemplate="layer %{x}: %{y:.2f}<extra></extra>",
    )  # fmt: skip
    figure.add_hline(y=0.5, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    figure.update_layout(template=FIGURE_STYLE, height=320, showlegend=False)
    figure.update_xaxes(title="layer", dtick=1 if len(frame) < 20 else None)
    figure.update_yaxes(title="held-out texts on the right side (share)", range=[0, 1.05])
    return figure


def dose_curve(frame: pd.DataFrame, label: str) -> go.Figure:
    """Draws the effect and the side effect over factors, from `Steering.to_frame`."""
    figure = Figure()
    figure.add_scatter(
        x=frame["factor"], y=frame["effect"], error_y=error_bars(frame, "effect"), mode="lines+markers", name="effect",
        line={"color": SCORE_COLOURS[-1]}, hovertemplate="factor %{x:g}: %{y:+.3g}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=340)
    figure.update_xaxes(title="factor")
    figure.update_yaxes(title=f"effect ({label})")
    if "side_effect" in frame:
        figure.add_scatter(
            x=frame["factor"], y=frame["side_effect"], error_y=error_bars(frame, "side_effect"),
            mode="lines+markers", yaxis="y2",
            line={"color": NEUTRAL, "dash": "dot"}, name="other texts",
            hovertemplate="factor %{x:g}: %{y:.3g} nats<extra></extra>",
        )  # fmt: skip
        figure.update_layout(
            yaxis2={
                "title": "KL divergence on other texts (nats)",
                "overlaying": "y",
                "side": "right",
                "showgrid": False,
            }
        )
    return figure
