"""A figure of one number for every head, over checkpoints."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE
from ...errors import InputError

_NAMED: Final = (
    ("#d55e00", "solid"), ("#2b8cc4", "dash"), ("#009e73", "dot"), ("#9a5fd6", "dashdot"), ("#b8860b", "longdash"),
    ("#cc79a7", "longdashdot"),
)  # fmt: skip
"""The colour and dash of the heads that change most."""


def lines_by_step(
    values: Float[np.ndarray, "head step"], steps: Sequence[str], names: Sequence[str], *, label: str
) -> go.Figure:
    """Draws a line for each head; the heads that change most are named, the others are grey.

    >>> figure = lines_by_step(np.array([[0.0, 0.9], [0.1, 0.1]]), ["0", "1"], ["L0H0", "L0H1"], label="induction")
    >>> [(trace.name, trace.showlegend) for trace in figure.data]
    [('L0H1', True), ('L0H0', True)]

    Args:
        values: each head's number at each step; NaN where undefined.
        steps: the names of the steps, in order.
        names: the names of the heads.
        label: the title of the vertical axis, which names the number.

    Returns:
        One trace per head; the head that changes most comes last.

    """
    if values.shape != (len(names), len(steps)):
        raise InputError(f"`values` must be [{len(names)} heads, {len(steps)} steps]; got {values.shape}.")
    known = np.isfinite(values)
    spread = np.where(known, values, -np.inf).max(axis=1) - np.where(known, values, np.inf).min(axis=1)
    order = np.argsort(np.where(known.any(axis=1), spread, -1.0), kind="stable")
    figure = Figure()
    for place, head in enumerate(order.tolist()):
        rank = len(order) - 1 - place
        colour, dash = _NAMED[rank] if rank < len(_NAMED) else ("rgba(128,128,128,0.45)", "solid")
        figure.add_scatter(
            x=list(steps),
            y=values[head],
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2 if rank < len(_NAMED) else 1},
            marker={"size": 4},
            name=names[head],
            showlegend=rank < len(_NAMED),
            meta=names[head],
            hovertemplate=f"{names[head]}<br>%{{x}}<br>%{{y:.3g}}<extra></extra>",
        )
    legend = {"traceorder": "reversed", "title": {"text": "the heads that change most"}}
    figure.update_layout(template=FIGURE_STYLE, height=420, margin={"t": 80}, legend=legend)
    figure.update_xaxes(title="checkpoint", type="category")
    figure.update_yaxes(title=label)
    return figure
