"""The figure that compares a set's effect with the effects of all sets of its shape."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, MARKS, NEUTRAL
from ...draw.text import signed


def null_sets(
    names: Sequence[str],
    effect: NDArray[np.floating],
    low: NDArray[np.floating],
    high: NDArray[np.floating],
    sharing: NDArray[np.bool_],
    *,
    label: str,
) -> go.Figure:
    """Draws one mark per set, from the smallest effect to the largest, and the first set as a star with its interval.

    `sharing` marks the sets that have a head in common with the first set; they get a different symbol.
    """
    figure = Figure()
    order = np.argsort(effect, kind="stable")
    place = np.empty(len(effect), dtype=int)
    place[order] = np.arange(1, len(effect) + 1)
    rest = np.arange(len(effect)) > 0
    kinds = (("sets that share a head with it", rest & sharing, MARKS["other"]), ("other sets", rest & ~sharing, None))
    for name, drawn, mark in kinds:
        figure.add_scatter(
            x=place[drawn], y=effect[drawn], mode="markers", name=name,
            marker={
                "color": mark.colour if mark else NEUTRAL, "symbol": mark.symbol if mark else "circle-open", "size": 5,
            },
            text=[f"{names[number]}<br>{signed(effect[number], '.4g')}" for number in drawn.nonzero()[0].tolist()],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    style = MARKS["self"]
    figure.add_scatter(
        x=place[:1], y=effect[:1], mode="markers", name=f"the tested set, {names[0]}",
        marker={"color": style.colour, "symbol": "star", "size": 13},
        error_y={"type": "data", "array": high[:1] - effect[:1], "arrayminus": effect[:1] - low[:1], "thickness": 2},
        text=[f"{names[0]}<br>{signed(effect[0], '.4g')}<br>95 %: {signed(low[0], '.3g')} to {signed(high[0], '.3g')}"],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure.add_hline(y=0, line={"color": NEUTRAL, "width": 1})
    figure.update_layout(template=FIGURE_STYLE, height=380, margin={"t": 60})
    figure.update_xaxes(title="sets of this shape, ordered by effect", showgrid=False)
    figure.update_yaxes(title=label)
    return figure
