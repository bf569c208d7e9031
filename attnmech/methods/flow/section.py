"""The section of a page that shows where the parts of the selected token's stream come from."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float, Int
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from ...basics.nouns import TEXT, Nouns
from ...draw.carried import error_of
from ...draw.chart import CHOSEN_COLOUR, ByChoice, Chart, Slot, row_frame, token_axis
from ...draw.figure import Figure
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, SCORE_COLOURS
from ...draw.text import bound, percent, quoted, token_labels

_INFLOWS: Final = 4  # the number of inflows that a sentence names, from the largest on
_STEPS: Final = np.linspace(0, 1, 11)
_ROOT_COLOURS: Final = [
    [float(step**2), colour]
    for step, colour in zip(_STEPS, sample_colorscale(SCORE_COLOURS, _STEPS.tolist()), strict=True)
]
"""Colours that follow the square root of a share, so that small shares stay visible."""


def flow_section(
    shares: Float[np.ndarray, "layer query key"],
    tokens: Sequence[str],
    *,
    layers_of_flow: Sequence[int],
    layers: Sequence[int],
    call: str,
    nouns: Nouns = TEXT,
) -> Section:
    """Shows from which tokens the parts of the selected token come, layer by layer.

    Args:
        shares: the share of each key in its row of ‖Σ_h p f(x) + δ x‖; rows sum to 1.
        tokens: the text's tokens.
        layers_of_flow: the layers of `shares`.
        layers: the layers that a reader can select on the page. The selected layer has a frame.
        call: the Python call that returns the result.
        nouns: the words for the input and its positions.

    """
    chart = _flow_chart(shares, tokens, layers_of_flow, layers, nouns)
    return Section(
        name="token-flow",
        tab="token",
        contents=f"Where a {nouns.token}'s parts come from",
        heading=f"Where a {nouns.token}'s parts come from",
        finding=_about_flow(shares, tokens, layers_of_flow, nouns),
        reading=f"After each layer's attention, the stream of the chosen {nouns.token} is a sum: what all heads "
        f"together bring from each {nouns.token} and, from the {nouns.token} itself, its earlier stream. A cell is the "
        "share of one of these parts in the sum of their norms (Kobayashi et al. 2021). The square is the largest "
        f"share from another {nouns.token}. Click a cell to follow that {nouns.token}; the frame is the chosen layer.",
        caveat="Shares compare norms, not meaning: parts may cancel, and MLPs are not included. Shades follow the "
        "square root, so that small shares stay visible.",
        figures={"token-inflow": chart},
        call=f"{call}.sources_of({{query}})",
        rounding=f"shares of inflow are off by at most {bound(error_of(chart))}",
    )


def _flow_chart(
    shares: Float[np.ndarray, "layer query key"],
    tokens: Sequence[str],
    own_layers: Sequence[int],
    layers: Sequence[int],
    nouns: Nouns,
) -> Chart:
    labels, names = token_labels(tokens), [str(layer) for layer in own_layers]
    by_query = np.where(shares > 0, shares, np.nan).transpose(1, 0, 2)
    most, _ = strongest(shares)
    figure = Figure()
    figure.add_heatmap(
        x=labels,
        y=names,
        zmin=0,
        zmax=1,
        colorscale=_ROOT_COLOURS,
        colorbar={"title": {"text": "share", "side": "right"}, "thickness": 12, "tickvals": [0.02, 0.1, 0.25, 0.5, 1],
                  "tickformat": ".0%"},
        hovertemplate="layer %{y}<br>from %{x}<br>%{z:.1%}<extra></extra>",
        hoverongaps=False,
        xgap=1 if len(labels) <= 64 else 0,
        ygap=1,
    )  # fmt: skip
    figure.add_scatter(
        y=names, mode="markers", hoverinfo="skip", showlegend=False, name=f"largest from another {nouns.token}",
        marker={"color": CHOSEN_COLOUR, "symbol": "square", "size": 8, "line": {"color": "white", "width": 1}},
    )  # fmt: skip
    frame, _ = row_frame(len(names))
    rows = np.array([own_layers.index(layer) for layer in layers], dtype=np.float64)
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": int(np.clip(170 + 22 * len(names), 250, 800)),
        "shapes": [frame],
        "xaxis": token_axis(labels, f"from {nouns.token}") | {"tickangle": -90, "showgrid": False},
        "yaxis": token_axis(names, "layer") | {"showgrid": False, "tickfont": None},
        "margin": {"t": 20},
    }
    slots = (
        Slot("data.0.z", ByChoice(by_query, ("query",))),
        Slot("data.1.x", ByChoice(most.T, ("query",), words=tuple(labels))),
        Slot("layout.shapes.0.y0", ByChoice(rows - 0.5, ("layer",))),
        Slot("layout.shapes.0.y1", ByChoice(rows + 0.5, ("layer",))),
    )
    return Chart(figure, slots, clicks={"query": "x"})


def strongest(
    shares: Float[np.ndarray, "layer query key"],
) -> tuple[Int[np.ndarray, "layer query"], Float[np.ndarray, "layer query"]]:
    """For each token, the other token that gives it the largest share (-1 if there is none), and that share."""
    others = shares.copy()
    every = np.arange(shares.shape[1])
    others[:, every, every] = 0
    share = others.max(axis=-1)
    return np.where(share > 0, others.argmax(axis=-1), -1), share


def _about_flow(
    shares: Float[np.ndarray, "layer query key"], tokens: Sequence[str], layers: Sequence[int], nouns: Nouns
) -> ByChoice:
    most, share = strongest(shares)

    def told(query: int) -> str:
        own = shares[:, query, query]
        low, high = (percent(float(end), 0) for end in (own.min(), own.max()))
        itself = f"{low} of its parts come" if low == high else f"{low} to {high} of its parts come"
        order = [at for at in np.argsort(-share[:, query], kind="stable").tolist() if most[at, query] >= 0][:_INFLOWS]
        parts = [
            f"{percent(float(share[at, query]))} from {most[at, query]} {quoted(tokens[most[at, query]])} in layer "
            f"{layers[at]}"
            for at in order
        ]
        largest = f"most from others: {', '.join(parts)}" if parts else f"nothing from other {nouns.tokens}"
        name = f"{nouns.token.capitalize()} {query} {quoted(tokens[query])}"
        return f"{name}: in each layer {itself} from itself; {largest}."

    return ByChoice.texts(("query",), (len(tokens),), told)
