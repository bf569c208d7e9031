"""Figures 4 to 6 of "Attention Focus Plots": how the focus of attention changes from layer to layer.

The heads of a layer lie on one vertical, ordered by their values, and a line joins the heads of one *rank*: the highest
of each layer, the second highest, and so on. Lines therefore do not cross, and no line follows one head.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from ...basics.arguments import index_of
from ...basics.nouns import Nouns
from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.numbers import FocusNumbers
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from ...errors import InputError

RANK_COLOURS: Final = SCORE_COLOURS[3:0:-1]  # highest rank first; the ends would vanish on white and on black
MOST_LAYER_TICKS: Final = 32  # with at most this many layers, every layer has a tick
MOST_TIED_HEADS: Final = 6  # the largest number of heads with the same value that a hover box names


def focus_chart(view: FocusNumbers, number: str, layers: Sequence[int]) -> Chart:
    """Draws the figure of a statistic (`number`: "self_top", "first_top" or "concentration"), with a ring at the chosen
    head.

    `layers` are the layers that the reader can choose from: all of the figure's layers, or some of them.
    """
    figure = rank_lines(view, number, (layers[0], 0))
    ring = len(figure.data) - 1
    values = getattr(view, number)[[view.layers.index(layer) for layer in layers]]
    return Chart(
        figure,
        (
            Slot(f"data.{ring}.x", ByChoice(np.array(layers)[:, None], ("layer",))),
            Slot(f"data.{ring}.y", ByChoice(values[..., None], ("layer", "head"))),
        ),
        clicks={"layer": "x", "head": "customdata.0"},
    )


def rank_lines(view: FocusNumbers, number: str, chosen: tuple[int, int] | None = None) -> go.Figure:
    """Draws one number per head (`number`, a field of the view) over the layers, with a line for each rank among the
    heads of a layer; heads without a number are ranked last and not drawn.

    Each trace is a rank (its `meta`; 0 is the highest); the `customdata` of its points begin with the head; hover
    boxes show intervals. `chosen`, a layer's label and a head's number, adds a last trace: the ring ("chosen").
    """
    values, layers, low, high = getattr(view, number), view.layers, view.low.get(number), view.high.get(number)
    ranked_head = np.argsort(-values, axis=1, kind="stable")  # within each layer; NaN goes last
    ranked_value = np.take_along_axis(values, ranked_head, axis=1)
    heads = values.shape[1]
    colours = sample_colorscale(RANK_COLOURS, [rank / max(heads - 1, 1) for rank in range(heads)])

    def hover_data(row: int, head: int) -> list[object]:
        """The head's number, its name with those of heads of the same value, and its interval."""
        name, own = f"L{layers[row]}H{head}", values[row, head]
        if equal := [f"H{other}" for other in np.flatnonzero(values[row] == own) if other != head]:
            more = f" and {len(equal) - MOST_TIED_HEADS} more" if len(equal) > MOST_TIED_HEADS else ""
            name += f" (tied with {', '.join(equal[:MOST_TIED_HEADS])}{more})"
        if low is None or high is None or np.isnan(low[row, head]):
            return [head, name, ""]
        return [head, name, f" ({low[row, head]:.3f} to {high[row, head]:.3f})"]

    figure = Figure()
    for rank in range(heads):
        figure.add_scatter(
            x=list(layers),
            y=ranked_value[:, rank].tolist(),
            customdata=[hover_data(row, head) for row, head in enumerate(ranked_head[:, rank].tolist())],
            mode="lines+markers",
            line={"color": colours[rank], "width": 1.5},
            marker={"size": 6},
            name="the highest head of each layer" if rank == 0 else "the lowest",
            showlegend=rank in (0, heads - 1),
            hovertemplate=f"%{{customdata[1]}}<br>%{{y:.3f}}%{{customdata[2]}}<br>rank {rank} of {heads} (0 is the "
            "highest)<extra></extra>",
            meta=rank,
        )
    if chosen is not None:
        layer, head = chosen
        if layer not in layers:
            raise InputError(f"`chosen` must name one of the layers {list(layers)}; got {layer}.")
        head = index_of("head", head, values.shape[1], "in each layer")
        figure.add_scatter(
            x=[layer],
            y=[values[list(layers).index(layer), head]],
            mode="markers",
            marker={"symbol": "circle-open", "size": 14, "color": NEUTRAL, "line": {"width": 2.5}},
            name="selected head",
            hoverinfo="skip",
            showlegend=True,
            meta="chosen",
        )
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": 400,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "layer"}} | ({"tickvals": list(layers)} if len(layers) <= MOST_LAYER_TICKS else {}),
        "yaxis": {
            "title": {"text": _quantity(number, view.nouns)},
            "range": [-0.04, 1.04],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
        },
        "margin": {"t": 40},
    }
    return figure


def _quantity(number: str, nouns: Nouns) -> str:
    if number == "concentration":
        return "mean of p(1) − p(2),<br>the two highest probabilities"
    place = f"{nouns.token} itself" if number == "self_top" else nouns.first
    return f"fraction of rows whose highest<br>score is at the {place}"
