"""All heads by kind: a letter and a colour for each."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from attnmech.draw.figure import Figure
from attnmech.draw.style import FIGURE_STYLE

_OTHER: Final = ("K", "#8c8c8c")

LETTERS: Final = {
    "previous": ("P", "#2b8cc4"),
    "next": ("N", "#5fb3b3"),
    "self": ("S", "#009e73"),
    "first": ("F", "#9a5fd6"),
    "sentence end": (".", "#b8860b"),
    "comma": (",", "#d4a017"),
    "special": ("X", "#7f7f7f"),
    "duplicate": ("D", "#cc79a7"),
    "induction": ("I", "#d55e00"),
}
"""The letter and the colour of each kind; those of a fixed offset have their number and grey."""


def kinds_map(
    kinds: Sequence[Sequence[str]], masses: Mapping[str, Float[np.ndarray, "layer head"]], layers: Sequence[int]
) -> go.Figure:
    """A map of layers × heads: the letter of each head's kind, and in its hover box the mass of every kind.

    >>> figure = kinds_map([["induction", ""]], {"induction": np.array([[0.9, 0.0]])}, [3])
    >>> [(trace.name, trace.x.tolist(), trace.text) for trace in figure.data]
    [('none claimed', [1], ('',)), ('induction', [0], ('I',))]

    Args:
        kinds: a row for each layer, with the kind of each head or "".
        masses: the mass on the targets of each kind; NaN where there are none.
        layers: the labels of the layers.

    Returns:
        One trace for each kind that some head has, and one for heads without a kind (the traces' `meta`).

    """
    names = ["", *[kind for kind in masses if any(kind in row for row in kinds)]]
    figure = Figure()
    for name in names:
        letter, colour = LETTERS.get(name, (name.split(" ")[0], _OTHER[1]))
        at = [(row, head) for row, heads in enumerate(kinds) for head, kind in enumerate(heads) if kind == name]
        if not at:
            continue
        figure.add_scatter(
            x=np.array([head for _, head in at]),
            y=[str(layers[row]) for row, _ in at],
            mode="markers+text",
            marker={"symbol": "square", "size": 20, "color": colour if name else "rgba(128,128,128,0.18)"},
            text=[letter if name else ""] * len(at),
            textfont={"color": "white", "size": 12},
            name=name or "none claimed",
            meta=name,
            customdata=[[layers[row], head] for row, head in at],
            hovertext=[_told(layers[row], (row, head), masses) for row, head in at],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=True,
        )
    figure.update_layout(template=FIGURE_STYLE, height=max(260, 150 + 24 * len(layers)), margin={"t": 80})
    figure.update_xaxes(title="head", dtick=1, showgrid=False)
    figure.update_yaxes(
        title="layer", autorange="reversed", type="category", showgrid=False,
        categoryorder="array", categoryarray=[str(layer) for layer in layers],
    )  # fmt: skip
    return figure


def _told(layer: int, place: tuple[int, int], masses: Mapping[str, Float[np.ndarray, "layer head"]]) -> str:
    """A head's masses, the largest first."""
    known = {kind: float(mass[place]) for kind, mass in masses.items() if np.isfinite(mass[place])}
    listed = sorted(known, key=lambda kind: -known[kind])[:6]
    return f"L{layer}H{place[1]}<br>" + "<br>".join(f"{kind} {known[kind]:.2f}" for kind in listed)
