"""Figures of heads that attend alike: a layer's divergences as a map, and all heads as points in a plane."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from ...draw.text import percent

_ALIKE_DARK: Final = SCORE_COLOURS[::-1]
"""Dark where heads attend alike."""


def divergence_map(
    divergence: Float[np.ndarray, "head head"],
    low: Float[np.ndarray, "head head"],
    high: Float[np.ndarray, "head head"],
    *,
    layer: int,
) -> go.Figure:
    """A map of heads × heads of one layer, coloured from 0 (dark: they attend alike) to ln 2 (no key in common).

    >>> two = np.array([[0.0, 0.2], [0.2, 0.0]])
    >>> divergence_map(two, two, two, layer=3).data[0].text[0][1]
    'L3H0 and L3H1<br>0.2 nats<br>95 %: 0.2 to 0.2'

    Args:
        divergence: the Jensen-Shannon divergence in nats; NaN where it was not measured.
        low: the low end of its interval; NaN without an interval.
        high: the high end of its interval.
        layer: the layer's label.

    """
    heads = len(divergence)
    figure = Figure()
    figure.add_heatmap(
        z=np.where(np.eye(heads, dtype=bool), np.nan, divergence),
        x=list(range(heads)),
        y=list(range(heads)),
        zmin=0.0,
        zmax=float(np.log(2)),
        colorscale=_ALIKE_DARK,
        colorbar={"title": {"text": "divergence, nats", "side": "right"}, "thickness": 12},
        text=[
            [_told(layer, one, other, divergence, low, high) for other in range(heads)] for one in range(heads)
        ],
        hovertemplate="%{text}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=max(260, 110 + 24 * heads))
    figure.update_xaxes(title=f"head of layer {layer}", dtick=1 if heads <= 32 else None, showgrid=False)
    figure.update_yaxes(title="head", autorange="reversed", dtick=1 if heads <= 32 else None, showgrid=False)
    return figure


def _told(
    layer: int,
    one: int,
    other: int,
    divergence: Float[np.ndarray, "head head"],
    low: Float[np.ndarray, "head head"],
    high: Float[np.ndarray, "head head"],
) -> str:
    pair = f"L{layer}H{one} and L{layer}H{other}"
    if not np.isfinite(divergence[one, other]):
        return f"{pair}<br>not measured"
    words = f"{pair}<br>{divergence[one, other]:.3g} nats"
    if not np.isfinite(low[one, other]):
        return words
    return f"{words}<br>95 %: {low[one, other]:.3g} to {high[one, other]:.3g}"


def heads_in_plane(
    points: Float[np.ndarray, "head 2"], places: Sequence[tuple[int, int]], nearest: Sequence[str], share: float
) -> go.Figure:
    """Every head as a point, coloured by layer; the closer two points are, the more the heads attend alike.

    >>> figure = heads_in_plane(np.array([[0.1, 0.0], [-0.1, 0.0]]), [(0, 0), (0, 1)], ["L0H1, 0.04"] * 2, 1.0)
    >>> figure.data[0].hovertext[0]
    'L0H0<br>nearest: L0H1, 0.04'

    Args:
        points: coordinates; distances between them are close to the root of the divergence.
        places: each head's layer and number.
        nearest: each head's nearest head and their divergence, in words.
        share: the share of the heads' spread that the plane shows.

    """
    layers = sorted({layer for layer, _ in places})
    shades = sample_colorscale("Viridis", np.linspace(0.0, 0.9, len(layers)).tolist())
    figure = Figure()
    for layer, colour in zip(layers, shades, strict=True):
        here = [number for number, (layer_of_head, _) in enumerate(places) if layer_of_head == layer]
        figure.add_scatter(
            x=points[here, 0],
            y=points[here, 1],
            mode="markers+text",
            marker={"color": colour, "size": 9, "line": {"color": NEUTRAL, "width": 0.5}},
            text=[f"L{layer}H{places[number][1]}" for number in here],
            textposition="top center",
            textfont={"size": 9},
            name=f"layer {layer}",
            customdata=[list(places[number]) for number in here],
            hovertext=[f"L{layer}H{places[number][1]}<br>nearest: {nearest[number]}" for number in here],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=True,
        )
    figure.update_layout(template=FIGURE_STYLE, height=480, margin={"t": 60})
    figure.update_xaxes(title=f"√nats; the plane captures {percent(share, 0)} of the spread")
    figure.update_yaxes(title="√nats", scaleanchor="x")
    return figure
