"""Figures of what the rotation of queries and keys contributes: wavelength bands, position kernels, dimensions."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from ...basics.nouns import TEXT, Nouns
from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.head_maps import SIGNED_COLOURS, reach_of
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS, TERMS
from ...draw.text import signed

_DASHES: Final = ("dash", "dot", "dashdot", "longdash", "longdashdot")


def band_maps(shares: Mapping[str, Float[np.ndarray, "layer head"]], *, layers: Sequence[int], label: str) -> go.Figure:
    """Draws a map of layers × heads for each band, on a common scale centred on zero.

    >>> figure = band_maps({"under 8 tokens": np.array([[0.4, -0.1]])}, layers=[3], label="share")
    >>> [(trace.meta, trace.y) for trace in figure.data]
    [('under 8 tokens', ('3',))]
    """
    reach = reach_of(np.stack(list(shares.values())))
    titles = [_in_two_lines(name) for name in shares]
    figure = Figure(make_subplots(1, len(shares), shared_yaxes=True, horizontal_spacing=0.02, subplot_titles=titles))
    for column, (name, share) in enumerate(shares.items(), start=1):
        hover = [
            [
                f"L{layer}H{head}<br>{name}<br>" + (signed(value, ".3g") if np.isfinite(value) else "not defined")
                for head, value in enumerate(row)
            ]
            for layer, row in zip(layers, share, strict=True)
        ]
        cells = go.Heatmap(
            z=share,
            x=list(range(share.shape[1])),
            y=[str(layer) for layer in layers],
            coloraxis="coloraxis",
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            xgap=1,
            ygap=1,
            meta=name,
        )
        figure.add_trace(cells, row=1, col=column)
    bar = {"title": {"text": label, "side": "right"}, "thickness": 12}
    scale = {"cmin": -reach, "cmax": reach, "colorscale": SIGNED_COLOURS, "colorbar": bar}
    title = {"text": "The bands of a head add up to 1 and may cancel each other.", "font": {"size": 13}, "y": 0.99}
    height = max(280, 170 + 18 * len(layers))
    figure.update_layout(template=FIGURE_STYLE, height=height, coloraxis=scale, margin={"t": 80}, title=title)
    figure.update_annotations(font={"size": 12, "color": NEUTRAL})
    figure.update_xaxes(title="head", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    return figure


def kernel_chart(
    distances: Float[np.ndarray, " distance"],
    whole: Float[np.ndarray, "layer head distance"],
    bands: Mapping[str, Float[np.ndarray, "layer head distance"]],
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws each head's position term by the distance from query to key, and what each band of wavelengths adds to it.

    Args:
        distances: query position − key position, in tokens.
        whole: the term at each distance, in units of the score, minus its value at distance 0.
        bands: what each band contributes at each distance; empty for a model without rotation.
        nouns: the words for the positions.

    Returns:
        A chart with one trace per band and, last, one for the whole "position" term (named in the traces' `meta`).

    """
    colours = sample_colorscale(SCORE_COLOURS[::-1][:4], np.linspace(0, 1, max(2, len(bands))).tolist())
    figure, slots = Figure(), []
    for place, (name, values) in enumerate({**bands, "position": whole}.items()):
        last = name == "position"
        line = (
            {"color": TERMS["position"].colour, "width": 3, "dash": "solid"}
            if last
            else {"color": colours[place], "width": 1.5, "dash": _DASHES[place % len(_DASHES)]}
        )
        figure.add_scatter(
            x=distances,
            mode="lines",
            line=line,
            name="sum" if last else name,
            meta=name,
            showlegend=True,
            hovertemplate=f"{name}<br>distance %{{x}}<br>%{{y:+.3f}}<extra></extra>",
        )
        slots.append(Slot(f"data.{place}.y", ByChoice(values, ("layer", "head"))))
    legend = {"title": {"text": "wavelength" if bands else "term"}}
    figure.update_layout(template=FIGURE_STYLE, height=420, legend=legend, margin={"t": 90})
    figure.update_xaxes(title=f"distance from query to key, in {nouns.tokens}")
    figure.update_yaxes(
        title=f"position term of the score,<br>minus its value at the {nouns.token} itself", zeroline=True
    )
    return Chart(figure, tuple(slots))


def dimension_bars(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draws the query, the key and what each dimension adds to the score, for one pair of tokens.

    Args:
        frame: the table of `SplitScores.dimensions`.
        title: names the pair and gives the sum.

    Returns:
        A figure with bars of "query", "key" and "product" (the traces' `meta`), one below the other.

    """
    names = {"query": "query q", "key": "key k", "product": "scale · q · k"}
    figure = Figure(make_subplots(3, 1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=list(names.values())))
    turns = [
        "<br>does not turn" if np.isinf(wavelength) else f"<br>a turn in {wavelength:.4g} tokens"
        for wavelength in frame["wavelength"]
    ]
    for row, name in enumerate(names, start=1):
        values = frame[name].to_numpy()
        colours = np.where(values < 0, SIGNED_COLOURS[0], SIGNED_COLOURS[-1]).tolist()
        bars = go.Bar(
            x=list(range(len(values))),
            y=values,
            marker={"color": colours if name == "product" else "#6f9cc1"},
            customdata=turns,
            hovertemplate=f"dimension %{{x}}%{{customdata}}<br>{name} %{{y:.4g}}<extra></extra>",
            showlegend=False,
            meta=name,
        )
        figure.add_trace(bars, row=row, col=1)
    figure.update_layout(
        template=FIGURE_STYLE, height=480, bargap=0.1, margin={"t": 90}, title={"text": title, "font": {"size": 13}}
    )
    figure.update_annotations(font={"size": 12, "color": NEUTRAL})
    figure.update_xaxes(title="dimension of the head", row=3)
    figure.update_yaxes(zeroline=True, zerolinecolor=NEUTRAL)
    figure.update_yaxes(title="score", row=3)
    return figure


def _in_two_lines(name: str) -> str:
    """The name of a band, broken into two lines.

    >>> _in_two_lines("under 8 tokens"), _in_two_lines("64 tokens and more")
    ('under 8<br>tokens', '64 tokens<br>and more')
    """
    return re.sub(" (and more|tokens)$", r"<br>\1", name)
