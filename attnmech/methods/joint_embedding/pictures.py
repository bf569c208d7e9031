"""Draws the points of a head, and measures how well distances in the picture still fit dot products."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, NEUTRAL
from ...draw.text import html_text
from ...maths.ranks import rank_correlation
from .formulas import weighted_correlation
from .projections import METRICS, trustworthiness
from .token_pairs import Pairs, drawn

NAMES: Final = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP", "pacmap": "PaCMAP", "opentsne": "openTSNE"}
_KINDS: Final = (("queries", "#0072b2", "circle"), ("keys", "#d55e00", "square"))  # colours and symbols of the page


def joint_scatter(
    points: Float[np.ndarray, "point dims"], labels: Sequence[str], where: Sequence[str], *, projection: str
) -> go.Figure:
    """Draws queries and keys of the same tokens as points in 2 or 3 dimensions.

    >>> figure = joint_scatter(np.zeros((2, 2)), ["shells"], ["text 0, token 3"], projection="PCA")
    >>> figure.data[1].name, figure.data[1].text[0]
    ('keys', 'shells<br>key, text 0, token 3')

    Args:
        points: coordinates of the queries, then of the keys, without unit.
        labels: the tokens as strings.
        where: the text and position of each token, in words.
        projection: the projection's name on the axes.

    """
    figure, tokens = Figure(), len(labels)
    wide = points.shape[1] == 3
    for number, (name, colour, symbol) in enumerate(_KINDS):
        here = points[number * tokens : (number + 1) * tokens]
        text = [
            f"{html_text(label)}<br>{name.removesuffix('s') if name == 'keys' else 'query'}, {place}"
            for label, place in zip(labels, where, strict=True)
        ]
        options = {
            "x": here[:, 0], "y": here[:, 1], "mode": "markers", "name": name, "text": text,
            "hovertemplate": "%{text}<extra></extra>",  # noqa: RUF027 - plotly fills it
            "marker": {"color": colour, "symbol": symbol, "size": 3 if wide else 5, "opacity": 0.7},
        }  # fmt: skip
        if wide:
            figure.add_scatter3d(z=here[:, 2], **options)
        else:
            figure.add_scattergl(**options) if tokens > 5_000 else figure.add_scatter(**options)
    figure.update_layout(template=FIGURE_STYLE, height=480)
    titles = [f"{projection} {axis + 1} (no unit)" for axis in range(points.shape[1])]
    if wide:
        figure.update_layout(scene={f"{name}axis": {"title": title} for name, title in zip("xyz", titles, strict=True)})
    else:
        figure.update_xaxes(title=titles[0])
        figure.update_yaxes(title=titles[1], scaleanchor="x")
    return figure


def criterion_curve(grid: Float[np.ndarray, " c"], curve: Float[np.ndarray, " c"], chosen: float) -> go.Figure:
    """Draws the weighted correlation at every c tried, and marks the chosen c.

    >>> figure = criterion_curve(np.array([0.5, 1.0, 2.0]), np.array([-0.2, -0.7, -0.4]), 1.0)
    >>> figure.data[1].x[0], figure.data[1].y[0]
    (1.0, -0.7)
    """
    figure = Figure()
    figure.add_scatter(
        x=grid, y=curve, mode="lines+markers", name="tried", line={"color": NEUTRAL, "width": 1.5},
        marker={"size": 4}, hovertemplate="c = %{x:.4g}<br>%{y:.4f}<extra></extra>",
    )  # fmt: skip
    at = int(np.abs(np.log(grid) - np.log(chosen)).argmin())
    figure.add_scatter(
        x=[float(grid[at])], y=[float(curve[at])], mode="markers", name="chosen",
        marker={"color": "#d55e00", "symbol": "square", "size": 9},
        hovertemplate="selected c = %{x:.4g}<br>%{y:.4f}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=320)
    figure.update_xaxes(title="c: queries × c, keys / c", type="log")
    figure.update_yaxes(title="weighted correlation between<br>distance and dot product")
    return figure


TRUST_POINTS: Final = 1_000  # the most random points for trustworthiness, which compares every pair of points
AFTER: Final = ("correlation", "spearman", "trustworthiness")


def after_projection(
    name: str,
    vectors: Float[Tensor, "point d"],
    points: Float[Tensor, "point dims"],
    offset: Float[Tensor, " d"],
    pairs: Pairs,
    seed: int,
) -> dict[str, float]:
    """Measures how well distances in the picture fit dot products, over the pairs of points that attention sees.

    `offset` is the vector that a shift added to the keys; it is subtracted again, so dot products are the model's.
    """
    tokens = len(vectors) // 2
    queries, keys = vectors[:tokens].double(), vectors[tokens:].double() - offset.double()
    wide = points.double()
    product = pairs.products(queries, keys)
    parts = zip(torch.split(pairs.query, 2**18), torch.split(pairs.key, 2**18), strict=True)
    distance = torch.cat([(wide[query] - wide[tokens + key]).norm(dim=-1) for query, key in parts])
    some = drawn(len(vectors), TRUST_POINTS, [seed, 3])
    return {
        "correlation": weighted_correlation(distance, product),
        "spearman": rank_correlation(distance, product),
        "trustworthiness": trustworthiness(vectors[some].numpy(), points[some].numpy(), METRICS[name]),
    }
