"""The map of all heads by type, with a letter and a colour for each type."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE
from ...draw.text import signed

_OTHER: Final = "#8c8c8c"

LETTERS: Final = {
    "previous": ("P", "#2b8cc4"),
    "next": ("N", "#5fb3b3"),
    "self": ("S", "#009e73"),
    "first": ("F", "#9a5fd6"),
    "sentence end": (".", "#b8860b"),
    "comma": (",", "#d4a017"),
    "special": ("X", "#7f7f7f"),
    "media": ("M", "#56b4e9"),
    "duplicate": ("D", "#cc79a7"),
    "induction": ("I", "#d55e00"),
    "retrieval": ("R", "#a6761d"),
    "copy suppression": ("−", "#0072b2"),
    "successor": ("+", "#0072b2"),
}
"""The letter and the colour of each type. A type with a fixed offset has its number as letter, in grey."""


def letter_of(name: str) -> tuple[str, str]:
    """Returns the letter and the colour of a type.

    >>> letter_of("induction"), letter_of("3 back")
    (('I', '#d55e00'), ('3', '#8c8c8c'))
    """
    return LETTERS.get(name, (name.split(" ", maxsplit=1)[0][:1], _OTHER))


def types_map(
    types: Sequence[Sequence[str]],
    masses: Mapping[str, Float[np.ndarray, "layer head"]],
    layers: Sequence[int],
    effects: Mapping[tuple[int, int], float],
) -> go.Figure:
    """Draws a map of layers × heads: the letter of each head's type, with its highest scores in the hover box.

    >>> figure = types_map([["induction", ""]], {"induction": np.array([[0.9, 0.0]])}, [3], {})
    >>> [(trace.name, trace.x.tolist(), trace.text) for trace in figure.data]
    [('no type claimed', [1], ('',)), ('induction', [0], ('I',))]

    Args:
        types: a row for each layer, with the type of each head or "".
        masses: the score of each type; NaN where there is none.
        layers: the labels of the layers.
        effects: the effect of ablating a head on the loss, in nats, by layer and head, if known.

    Returns:
        A figure with one trace for each type that occurs, and one for heads without a type (the traces' `meta`).

    """
    names = ["", *[name for name in masses if any(name in row for row in types)]]
    figure = Figure()
    for name in names:
        letter, colour = letter_of(name)
        at = [(row, head) for row, heads in enumerate(types) for head, kind in enumerate(heads) if kind == name]
        if not at:
            continue
        figure.add_scatter(
            x=np.array([head for _, head in at]),
            y=[str(layers[row]) for row, _ in at],
            mode="markers+text",
            marker={"symbol": "square", "size": 20, "color": colour if name else "rgba(128,128,128,0.18)"},
            text=[letter if name else ""] * len(at),
            textfont={"color": "white", "size": 12},
            name=name or "no type claimed",
            meta=name,
            customdata=[[layers[row], head] for row, head in at],
            hovertext=[_hover_text(layers[row], (row, head), masses, effects) for row, head in at],
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


def _hover_text(
    layer: int,
    place: tuple[int, int],
    masses: Mapping[str, Float[np.ndarray, "layer head"]],
    effects: Mapping[tuple[int, int], float],
) -> str:
    known = {name: float(mass[place]) for name, mass in masses.items() if np.isfinite(mass[place])}
    listed = sorted(known, key=lambda name: -known[name])[:6]
    lines = [f"L{layer}H{place[1]}", *(f"{name} {known[name]:.2f}" for name in listed)]
    effect = effects.get((layer, place[1]))
    return "<br>".join(lines if effect is None else [*lines, f"ablated: {signed(effect, '.3f')} nats of loss"])
