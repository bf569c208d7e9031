"""The figures of attribution: estimates against exact effects, and edges as a graph."""

from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from ...draw.figure import Figure
from ...draw.head_maps import SIGNED_COLOURS
from ...draw.intervals import error_bars
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from ...results.graph import EMBEDDING, LOGITS, Graph

COLOURS: Final[Mapping[bool, tuple[str, str]]] = {False: ("strongest", SCORE_COLOURS[-1]), True: ("controls", NEUTRAL)}
"""The name and colour of nodes, by whether they are controls."""


def confirmed(frame: pd.DataFrame) -> go.Figure:
    """Draws the exact effect of each node in `Confirmation.to_frame` over its estimate, with the line of equality."""
    figure = Figure()
    ends = [float(frame[["estimate", "exact"]].min().min()), float(frame[["estimate", "exact"]].max().max())]
    line = {"color": NEUTRAL, "width": 1, "dash": "dot"}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, name="exact = estimate", hoverinfo="skip")
    for control, (name, colour) in COLOURS.items():
        some = frame[frame["control"] == control]
        figure.add_scatter(
            x=some["estimate"],
            y=some["exact"],
            error_y=error_bars(some, "exact"),
            mode="markers",
            marker={"color": colour, "size": 7},
            name=name,
            text=some["node"],
            hovertemplate="%{text}<br>estimate %{x:.3g}<br>exact %{y:.3g}<extra></extra>",
        )
    figure.update_layout(template=FIGURE_STYLE, height=340)
    figure.update_xaxes(title="estimate")
    figure.update_yaxes(title="exact effect")
    return figure


def edge_graph(frame: pd.DataFrame, graph: Graph, holds: Sequence[bool], label: str) -> go.Figure:
    """Draws edges between the nodes of a graph, layers upward; `frame` has their sender, receiver and effect.

    Heads are labelled by their numbers. Edges that hold are solid, the others dotted.
    """
    figure, size = Figure(), float(frame["effect"].abs().max()) or 1.0
    for (_, row), held in zip(frame.iterrows(), holds, strict=True):
        (x, y), (to_x, to_y) = _place(row["sender"], graph, sends=True), _place(row["receiver"], graph, sends=False)
        colour = SIGNED_COLOURS[1] if row["effect"] < 0 else SIGNED_COLOURS[3]
        line = {
            "color": colour, "width": 0.7 + 5 * abs(row["effect"]) / size, "dash": "solid" if held else "dot",
        }  # fmt: skip
        figure.add_scatter(x=[x, to_x], y=[y, to_y], mode="lines", line=line, hoverinfo="skip")
        hover = f"{row['sender']} → {row['receiver']}<br>{label} {row['effect']:+.3g}<extra></extra>"
        figure.add_scatter(
            x=[(x + to_x) / 2], y=[(y + to_y) / 2], mode="markers", marker={"size": 9, "color": colour, "opacity": 0},
            hovertemplate=hover,
        )  # fmt: skip
    nodes = dict.fromkeys([*frame["sender"], *(_node(name, graph) for name in frame["receiver"])])
    for ends in (True, False):
        some = [node for node in nodes if (node in (EMBEDDING, LOGITS)) == ends]
        places = [_place(node, graph, sends=True) for node in some]
        figure.add_scatter(
            x=[x for x, _ in places], y=[y for _, y in places], mode="markers+text", hovertext=some, hoverinfo="text",
            text=some if ends else [node.partition("H")[2] or "MLP" for node in some],
            textposition=["bottom center" if node == EMBEDDING else "top center" for node in some] if ends
            else "middle center",
            textfont={} if ends else {"color": "white", "size": 11},
            marker={"size": 10 if ends else 28, "color": NEUTRAL, "opacity": 1},
        )  # fmt: skip
    layers = list(range(graph.n_layers))
    figure.update_layout(template=FIGURE_STYLE, height=max(420, 60 * (graph.n_layers + 2)), showlegend=False)
    figure.update_xaxes(visible=False, range=[-0.8, _width(graph) + 1.2])
    span = [-1.6, graph.n_layers + 0.6]
    figure.update_yaxes(title="layer", tickvals=layers, range=span, zeroline=False)
    return figure


def _place(name: str, graph: Graph, *, sends: bool) -> tuple[float, float]:
    """Where a node stands: heads side by side, the MLP to their right and a little higher, as it runs later."""
    middle = (_width(graph) - 1) / 2
    if name == EMBEDDING:
        return middle, -1.0
    if name == LOGITS:
        return middle, float(graph.n_layers)
    node = name if sends else _node(name, graph)
    layer, _, number = node.removeprefix("L").partition("H")
    if not number:
        return graph.n_heads + 0.5, float(layer.removesuffix(" MLP")) + 0.3
    return float(number), float(layer)


def _node(receiver: str, graph: Graph) -> str:
    """The node, or the first node, that an input belongs to."""
    return (*graph.nodes_of(receiver), receiver)[0]


def _width(graph: Graph) -> float:
    return graph.n_heads + 1.0
