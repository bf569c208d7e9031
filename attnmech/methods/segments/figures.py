"""The attention that each segment of a text receives, as lines."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.segments import MOST_LABELS
from ...draw.style import FIGURE_STYLE

_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "x")
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


def receiver_lines(scores: Mapping[str, Float[np.ndarray, " segment"]], labels: Sequence[str]) -> go.Figure:
    """The attention that each segment receives from later segments, one line per head.

    >>> receiver_lines({"L0H1": np.array([0.1, np.nan])}, ["0 a", "1 b"]).data[0].name
    'L0H1'
    """
    count = len(labels)
    colours = sample_colorscale("Viridis", np.linspace(0.0, 0.85, max(2, len(scores))).tolist())
    figure = Figure()
    for number, (name, values) in enumerate(scores.items()):
        figure.add_scatter(
            x=list(range(count)),
            y=values,
            mode="lines+markers",
            name=name,
            line={"color": colours[number], "dash": _DASHES[number % len(_DASHES)]},
            marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
            text=list(labels),
            hovertemplate=f"{name}<br>%{{text}}<br>%{{y:.3g}}<extra></extra>",
            showlegend=True,
        )
    ticks = {"tickvals": list(range(count)), "ticktext": list(labels)} if count <= MOST_LABELS else {}
    figure.update_layout(template=FIGURE_STYLE, height=360, margin={"t": 40})
    figure.update_xaxes(title="segment", **ticks)
    figure.update_yaxes(title="mean p from later segments", rangemode="tozero")
    return figure
