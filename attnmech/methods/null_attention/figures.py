"""A map of verdicts, layers × heads: whether each head's attention to a sink has an effect."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE
from ...draw.text import percent, signed, with_minus_signs

VERDICT_STYLES: Final = {
    "resting": ("R", "#6f9cc1"),
    "active": ("A", "#e69f00"),
    "unused": ("U", "#a6cfa0"),
    "subtle": ("S", "#cc79a7"),
    "undecided": ("?", "#ead96b"),
    "not attending": ("·", "#bdbdbd"),
}
"""The letter and the colour of each verdict's cells: they differ in hue and letter, and black is legible on all."""

LETTER_COLOUR: Final = "#111111"


def verdict_map(
    verdicts: Sequence[Sequence[str]],
    numbers: Mapping[str, Sequence[Float[np.ndarray, "layer head"]]],
    *,
    layers: Sequence[int],
    null_share: Sequence[float],
) -> go.Figure:
    """Draws one cell per head with its verdict, and its numbers in the hover box; cells without a verdict are blank.

    `numbers` are values with the ends of their intervals, NaN where there are none. `null_share` is written beside each
    layer, unless it is NaN.
    """
    names = list(VERDICT_STYLES)
    count = len(names)
    heads = len(verdicts[0])
    steps = [[edge / count, VERDICT_STYLES[name][1]] for place, name in enumerate(names) for edge in (place, place + 1)]
    figure = Figure(
        go.Heatmap(
            z=[[names.index(name) if name else None for name in row] for row in verdicts],
            x=list(range(heads)),
            y=[
                str(layer) if math.isnan(share) else f"{layer} · {percent(share, 0)}"
                for layer, share in zip(layers, null_share, strict=True)
            ],
            zmin=-0.5,
            zmax=count - 0.5,
            colorscale=steps,
            colorbar={
                "tickvals": list(range(count)),
                "ticktext": [f"{letter} {name}" for name, (letter, _) in VERDICT_STYLES.items()],
                "thickness": 12,
            },
            text=[[VERDICT_STYLES[name][0] if name else "" for name in row] for row in verdicts],
            texttemplate="%{text}",
            textfont={"color": LETTER_COLOUR},
            customdata=[[[layer, head] for head in range(heads)] for layer in layers],
            hovertext=[
                [_hover(layer, head, name, numbers, place) for head, name in enumerate(row)]
                for place, (layer, row) in enumerate(zip(layers, verdicts, strict=True))
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    figure.update_layout(template=FIGURE_STYLE, height=max(180, 60 + 24 * len(layers)))
    figure.update_xaxes(title="head", dtick=1 if heads <= 32 else None, showgrid=False)
    figure.update_yaxes(title="layer · null share", autorange="reversed", type="category", showgrid=False)
    return figure


def _hover(
    layer: int, head: int, verdict: str, numbers: Mapping[str, Sequence[Float[np.ndarray, "layer head"]]], place: int
) -> str:
    if not verdict:
        return f"L{layer}H{head}<br>not measured"
    lines = [_line(label, *(end[place, head] for end in ends)) for label, ends in numbers.items()]
    return "<br>".join([f"L{layer}H{head}: {verdict}", *lines])


def _line(label: str, value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return f"{label}: none"
    interval = f" ({signed(low, '.3g')} to {signed(high, '.3g')})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{label}: {with_minus_signs(f'{value:.3g}')}{interval}"
