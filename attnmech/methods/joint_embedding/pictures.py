"""Projects the points of every head, and measures how well distances in the picture still fit dot products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...draw.figure import Figure
from ...draw.style import FIGURE_STYLE, NEUTRAL
from ...draw.text import html_text
from ...errors import InputError
from ...maths.ranks import rank_correlation
from .distances import weighted_correlation
from .projections import CANNOT_PLACE, METRICS, Projection, Watch, check_enough, project, trustworthiness
from .token_pairs import Pairs, drawn

NAMES: Final = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP", "pacmap": "PaCMAP", "opentsne": "openTSNE"}
"""The projections' names on pages and axes."""

_KINDS: Final = (("queries", "#0072b2", "circle"), ("keys", "#d55e00", "square"))
"""The kinds of points with the colours and symbols of the page (`embedding_view`)."""


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


FITTED: Final = 12_000
"""The largest number of a head's points to which a projection is fitted; it then places the other points."""

TRUST_POINTS: Final = 1_000
"""The largest number of random points for trustworthiness, which compares every pair of points."""

AFTER: Final = ("correlation", "spearman", "trustworthiness")
"""The measures taken after projection."""


@dataclass(frozen=True)
class Projecting:
    """A projection's name and settings."""

    name: str
    dims: int
    perplexity: float
    seed: int

    def check(self, count: int) -> None:
        """Raises `InputError` for too few points, and for more points than a projection is fitted to, if it cannot
        place the others.
        """
        if count > FITTED and self.name in CANNOT_PLACE:
            raise InputError(
                f'projection="{self.name}" takes at most {FITTED:,} points ({FITTED // 2:,} tokens); got '
                f"{count // 2:,} tokens. Use sample={FITTED // 2} or less, or a projection that can place further "
                'points: "pca", "umap" or "opentsne".'
            )
        check_enough(self.name, count, dims=self.dims, perplexity=self.perplexity)

    def fit(self, vectors: Float[Tensor, "point d"], watch: Watch = lambda share: None) -> Projection:
        """Fits the projection to a head's points, or to the queries and keys of a sample of its tokens."""
        fitted = vectors[self._fitted(len(vectors))] if self.name != "pca" else vectors
        settings: Any = {"dims": self.dims, "perplexity": self.perplexity, "seed": self.seed}
        return project(self.name, fitted.numpy(), watch=watch, **settings)

    def points(self, vectors: Float[Tensor, "point d"], watch: Watch) -> Float[Tensor, "point dims"]:
        """Returns all of a head's points in the picture, in float32; `watch` hears of the share that is done."""
        projection = self.fit(vectors, watch)
        if len(projection.points) == len(vectors):
            return torch.from_numpy(np.asarray(projection.points, dtype=np.float32))
        assert projection.place is not None
        chosen = self._fitted(len(vectors))
        rest = torch.ones(len(vectors), dtype=torch.bool).index_fill(0, chosen, False)
        placed = torch.empty(len(vectors), self.dims)
        placed[chosen] = torch.from_numpy(projection.points).float()
        placed[rest] = torch.from_numpy(projection.place(vectors[rest].numpy())).float()
        return placed

    def _fitted(self, count: int) -> Tensor:
        tokens = count // 2
        chosen = drawn(tokens, FITTED // 2, [self.seed, 2])
        return torch.cat((chosen, chosen + tokens))


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
    distance = (
        torch.cat(
            [
                (wide[query] - wide[tokens + key]).norm(dim=-1)
                for query, key in zip(torch.split(pairs.query, 2**18), torch.split(pairs.key, 2**18), strict=True)
            ]
        )
        if len(pairs)
        else product
    )
    some = drawn(len(vectors), TRUST_POINTS, [seed, 3])
    return {
        "correlation": weighted_correlation(distance, product),
        "spearman": rank_correlation(distance, product),
        "trustworthiness": trustworthiness(vectors[some].numpy(), points[some].numpy(), METRICS[name]),
    }
