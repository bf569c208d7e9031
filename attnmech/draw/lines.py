"""Lines over the layers: a number for each token, or for each type of token."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from ..basics.public import public
from ..errors import InputError
from .figure import Figure
from .style import FIGURE_STYLE, NEUTRAL
from .text import plotly_text

_COLOURS: Final = ("#d55e00", "#2b8cc4", "#009e73", "#9a5fd6", "#b8860b", "#cc79a7")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_SYMBOLS: Final = ("circle", "square", "diamond", "cross", "x", "triangle-up")

MOST_NAMED: Final = 24
"""The largest number of lines that are all named; with more lines, only those that change most are named."""

_FEW_NAMED: Final = 6


@public
def lines_by_layer(
    values: Float[np.ndarray, "line layer"],
    layers: Sequence[int],
    names: Sequence[str],
    *,
    label: str,
    low: Float[np.ndarray, "line layer"] | None = None,
    high: Float[np.ndarray, "line layer"] | None = None,
    baselines: Mapping[str, Float[np.ndarray, " layer"]] | None = None,
    logarithmic: bool = False,
) -> go.Figure:
    """Draws one line per name over the layers, with intervals if known, and up to two grey baselines.

    >>> figure = lines_by_layer(np.array([[1.0, 0.4]]), [0, 1], ["0 Time"], label="cosine")
    >>> [(trace.name, list(trace.x)) for trace in figure.data]
    [('0 Time', [0, 1])]

    Args:
        values: the numbers; NaN if missing.
        layers: the labels of the layers.
        names: the names of the lines; this function escapes them.
        label: the title of the vertical axis.
        low: the low ends of intervals, drawn as bars.
        high: the high ends.
        baselines: the values expected by chance, by name.
        logarithmic: draws 1 + value on a logarithmic axis, so that 0 can be drawn.

    """
    if values.shape != (len(names), len(layers)):
        raise InputError(f"`values` must be [{len(names)} lines, {len(layers)} layers]; got {values.shape}.")
    figure = Figure()
    shown = values + 1 if logarithmic else values
    known = np.isfinite(values)
    moved = np.where(known, shown, -np.inf).max(axis=1) - np.where(known, shown, np.inf).min(axis=1)
    named = np.argsort(-moved, kind="stable")[: _FEW_NAMED if len(names) > MOST_NAMED else len(names)].tolist()
    order = sorted(range(len(names)), key=lambda line: line in named)
    for line in order:
        name, bars = plotly_text(names[line]), None
        look: dict[str, object] = {"mode": "lines", "line": {"color": "rgba(128,128,128,0.45)", "width": 1}}
        if line in named:
            round_, place = divmod(sorted(named).index(line), len(_COLOURS))
            dash = _DASHES[round_ % len(_DASHES)]
            look = {
                "mode": "lines+markers",
                "line": {"color": _COLOURS[place], "dash": dash, "width": 2},
                "marker": {"symbol": _SYMBOLS[place], "size": 7},
            }
        if low is not None and high is not None and np.isfinite(low[line]).any():
            up, down = (np.nan_to_num(end[line] - values[line]) for end in (high, low))
            bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": -down, "thickness": 1}
        figure.add_scatter(
            x=list(layers),
            y=shown[line],
            customdata=values[line],
            name=name,
            showlegend=line in named,
            error_y=bars,
            hovertemplate=f"{name}<br>layer %{{x}}<br>%{{customdata:.4g}}<extra></extra>",
            **look,
        )
    for dash, (name, baseline) in zip(("dot", "longdash"), (baselines or {}).items(), strict=False):
        figure.add_scatter(
            x=list(layers), y=baseline, name=plotly_text(name), mode="lines",
            line={"color": NEUTRAL, "dash": dash, "width": 2},
            hovertemplate=f"{plotly_text(name)}<br>layer %{{x}}<br>%{{y:.4g}}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=420, showlegend=True)
    figure.update_xaxes(title="layer", dtick=max(1, len(layers) // 12))
    figure.update_yaxes(title=label)
    if logarithmic:
        figure.update_yaxes(type="log", dtick=1, exponentformat="none", separatethousands=True)
    return figure
