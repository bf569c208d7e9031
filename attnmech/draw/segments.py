"""Segments (or tokens) of a text as the rows and columns of a map, and what each receives as lines."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from .effects import SIGNED_COLOURS
from .figure import Figure
from .style import FIGURE_STYLE, SCORE_COLOURS
from .text import isolated, plotly_text, signed, visible_token

_LABEL: Final = 18
"""Characters of a segment in a tick label."""

_HOVER: Final = 80
"""Characters of a segment in a hover box."""

_LABELS: Final = 40
"""The most segments of which each has a tick label."""

_BARS: Final = {
    "mass": "share of attention",
    "per_token": "mean p per pair of tokens",
    "excess": "share above baseline",
    "kl": "KL, nats",
    "loss": "loss, nats",
    "rollout": "rollout, share",
    "norm": "norm",
    "norm_residual": "norm",
    "gradient": "p · ∂metric/∂p",
}

_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "x")
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


def segment_labels(segments: Sequence[str]) -> list[str]:
    """A readable name for each segment: its number and how it begins.

    >>> segment_labels([" The file is urgent.", "<b>"])
    ['0 The file is urgen…', '1 &lt;b&gt;']
    """
    return [f"{number} {_cut(text, _LABEL)}" for number, text in enumerate(segments)]


def _cut(text: str, length: int) -> str:
    line = visible_token(" ".join(text.split())).lstrip("·").replace("·", " ")
    return isolated(plotly_text(line if len(line) <= length else f"{line[: length - 1]}…"))


def segment_map(
    values: Float[np.ndarray, "query_segment key_segment"],
    labels: Sequence[str],
    *,
    kind: str,
    title: str,
    unit: str = "segment",
) -> go.Figure:
    """Query segments × key segments of one head; cells that are NaN stay empty.

    `kind` says which numbers: "mass", "per_token", "excess", an effect ("kl", "loss") or a flow ("rollout", "norm",
    "norm_residual", "gradient"); `unit` is what rows and columns are.

    >>> segment_map(np.array([[1.0, 0.0], [0.4, 0.6]]), ["0 a", "1 b"], kind="mass", title="L0H1").data[0].text[1][0]
    '1 b → 0 a<br>0.4'
    """
    count = len(labels)
    above = kind in ("excess", "loss", "gradient")
    known = np.abs(values[np.isfinite(values)])
    reach = float(known.max()) if known.size and known.max() > 0 else 1.0
    told = [
        [
            f"{query} → {key}<br>{signed(value, '.3g') if above else f'{value:.3g}'}"
            for key, value in zip(labels, row, strict=True)
        ]
        for query, row in zip(labels, values.tolist(), strict=True)
    ]
    figure = Figure()
    figure.add_heatmap(
        z=values,
        x=list(range(count)),
        y=list(range(count)),
        zmin=-reach if above else 0.0,
        zmax=reach,
        colorscale=SIGNED_COLOURS if above else SCORE_COLOURS,
        colorbar={"title": {"text": _BARS[kind], "side": "right"}, "thickness": 12},
        text=told,
        hovertemplate="%{text}<extra></extra>",
        hoverongaps=False,
        xgap=1 if count <= _LABELS else 0,
        ygap=1 if count <= _LABELS else 0,
    )
    ticks = {"tickvals": list(range(count)), "ticktext": list(labels)} if count <= _LABELS else {}
    numbers = {**ticks, "ticktext": [str(each) for each in range(count)]} if ticks else {}
    figure.update_layout(template=FIGURE_STYLE, height=max(280, 130 + min(24 * count, 700)))
    figure.update_xaxes(title=f"key {unit} ({title})", showgrid=False, tickangle=0, **numbers)
    side = {"text": f"query {unit}", "standoff": 12}
    figure.update_yaxes(title=side, autorange="reversed", showgrid=False, **ticks)
    return figure


def receiver_lines(scores: Mapping[str, Float[np.ndarray, " segment"]], labels: Sequence[str]) -> go.Figure:
    """What each segment receives from later ones, a line for each head.

    >>> receiver_lines({"L0H1": np.array([0.1, np.nan])}, ["0 a", "1 b"]).data[0].name
    'L0H1'
    """
    count = len(labels)
    colours = sample_colorscale("Viridis", np.linspace(0.0, 0.85, max(2, len(scores))).tolist())
    figure = Figure()
    for number, (name, values) in enumerate(scores.items()):
        figure.add_scatter(
            x=list(range(count)),
            y=values,
            mode="lines+markers",
            name=name,
            line={"color": colours[number], "dash": _DASHES[number % len(_DASHES)]},
            marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
            text=list(labels),
            hovertemplate=f"{name}<br>%{{text}}<br>%{{y:.3g}}<extra></extra>",
            showlegend=True,
        )
    ticks = {"tickvals": list(range(count)), "ticktext": list(labels)} if count <= _LABELS else {}
    figure.update_layout(template=FIGURE_STYLE, height=360, margin={"t": 40})
    figure.update_xaxes(title="segment", **ticks)
    figure.update_yaxes(title="mean p from later segments", rangemode="tozero")
    return figure
