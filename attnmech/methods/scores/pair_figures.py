"""A map of what pairs of sources, one at the query and one at the key, add to a score."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...draw.figure import Figure
from ...draw.head_maps import SIGNED_COLOURS
from ...draw.style import FIGURE_STYLE
from ...draw.text import plotly_text, signed


def pair_map(values: Float[Tensor, "source_q source_k"], names: Sequence[str], *, top: int, label: str) -> go.Figure:
    """Draws the pairs of the `top` sources at the query and of the `top` at the key; the others are one row and column.

    >>> figure = pair_map(torch.tensor([[1.0, -3.0], [0.5, 0.0]]), ["A", "B"], top=1, label="contribution")
    >>> figure.data[0].z.tolist(), figure.data[0].x, figure.data[0].y
    ([[-3.0, 1.0], [0.0, 0.5]], ('B', '1 other'), ('A', '1 other'))
    """
    values, queries = _gathered(values, names, top)
    turned, keys = _gathered(values.T, names, top)
    shown = turned.T.double().numpy()
    hover = [
        [f"query: {query}<br>key: {key}<br>{signed(float(value), '.3f')}" for key, value in zip(keys, row, strict=True)]
        for query, row in zip(queries, shown, strict=True)
    ]
    reach = float(np.nanmax(np.abs(shown), initial=0.0)) or 1.0
    figure = Figure()
    figure.add_heatmap(
        z=shown,
        x=keys,
        y=queries,
        zmin=-reach,
        zmax=reach,
        colorscale=SIGNED_COLOURS,
        colorbar={"title": {"text": label, "side": "right"}, "thickness": 12},
        text=hover,
        hovertemplate="%{text}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    figure.update_layout(template=FIGURE_STYLE, height=max(280, 150 + 24 * len(queries)))
    figure.update_xaxes(title="source at the key", type="category", tickangle=-45, showgrid=False)
    figure.update_yaxes(
        title={"text": "source at the query", "standoff": 12}, type="category", autorange="reversed", showgrid=False
    )
    return figure


def _gathered(
    values: Float[Tensor, "source other"], names: Sequence[str], top: int
) -> tuple[Float[Tensor, "row other"], list[str]]:
    """The rows with the largest entries, largest first, and the sum of all other rows."""
    order = values.abs().amax(dim=1).nan_to_num().argsort(descending=True, stable=True).tolist()
    first, others = order[:top], sorted(order[top:])
    labels = [plotly_text(names[row]) for row in first]
    if not others:
        return values[first], labels
    return torch.cat([values[first], values[others].sum(dim=0)[None]]), [*labels, f"{len(others)} other"]
