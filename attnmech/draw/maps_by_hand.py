"""Attention maps from arrays, each in one call; the weights may come from any code, such as `nn.MultiheadAttention`.

>>> import numpy as np
>>> weights = np.array([[0.9, 0.1], [0.3, 0.7]])
>>> heatmap(weights, ["The", "cat"])
Figure(heatmap; shows itself in a notebook, or .show())
>>> heatmaps(np.stack([weights, weights[::-1]]), ["The", "cat"]).data["heads"]
2
>>> edges(weights, ["The", "cat"], threshold=0.5).data["threshold"]
0.5
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from ..basics.public import public
from ..errors import InputError
from .all_heads import model_view
from .embed import View
from .graph import token_graph
from .head_maps import cell_map
from .patterns import Array, as_array, checked_pattern
from .text import isolated, plotly_text, visible_token

_TICKS: Final = 40  # the largest number of positions along an axis at which every position has a label


@public
def heatmap(
    weights: Array, labels: Sequence[str] | None = None, *, keys: Sequence[str] | None = None, sums_to_one: bool = True
) -> go.Figure:
    """Draws one head's attention as a heatmap: queries downwards, keys to the right, from 0 to 1.

    >>> weights = [[1.0, 0.0], [0.25, 0.75]]
    >>> heatmap(weights, ["Hi", "<b>"]).data[0].text[1][0]
    '1 &lt;b&gt; → 0 Hi<br>0.25'

    Args:
        weights: probabilities after softmax, [query key].
        labels: the names of the positions; by default their numbers.
        keys: the names of the keys, if they are not the queries.
        sums_to_one: whether every row must sum to 1; if not, to at most 1.

    Raises:
        InputError: for weights that are not probabilities, or without a label for each position.

    """
    array = as_array(weights)
    queries, of_keys = _labels(array, labels, keys, axes="query key")
    checked_pattern(array, queries, of_keys, axes="query key", sums_to_one=sums_to_one)
    rows, columns = _numbered(queries), _numbered(queries if of_keys is None else of_keys)
    figure = cell_map(
        array,
        lambda row, column: f"{rows[row]} → {columns[column]}<br>{array[row, column]:.3g}",
        "attention",
        ends=(0.0, 1.0),
        gap=0,
    )
    figure.update_layout(height=max(280, 130 + min(24 * len(rows), 700)))
    figure.update_xaxes(title="key", tickangle=-45 if keys or labels else 0, **_ticks(columns))
    figure.update_yaxes(title={"text": "query", "standoff": 12}, **_ticks(rows))
    return figure


@public
def heatmaps(
    weights: Array,
    labels: Sequence[str] | None = None,
    *,
    keys: Sequence[str] | None = None,
    sums_to_one: bool = True,
    title: str = "Attention of all heads",
) -> View:
    """Shows small maps of all heads, and a large map of the selected head: `model_view` of one or more layers.

    Args:
        weights: probabilities after softmax, [head query key] or [layer head query key].
        labels: the names of the positions; by default their numbers.
        keys: the names of the keys, if they are not the queries.
        sums_to_one: whether every row must sum to 1; if not, to at most 1.
        title: the view's heading.

    """
    array = _by_layer(weights)
    queries, of_keys = _labels(array, labels, keys, axes="layer head query key")
    return model_view(array, queries, layers=range(len(array)), keys=of_keys, sums_to_one=sums_to_one, title=title)


@public
def edges(
    weights: Array,
    labels: Sequence[str] | None = None,
    *,
    threshold: float = 0.1,
    keys: Sequence[str] | None = None,
    sums_to_one: bool = True,
    title: str = "Token graph",
) -> View:
    """Draws attention as a directed graph: an edge from each query to each key with a weight of at least `threshold`.

    The width of an edge shows its weight.

    Args:
        weights: probabilities after softmax, [query key], [head query key] or [layer head query key].
        labels: the names of the positions; by default their numbers.
        threshold: the initial threshold, above 0 and up to 1; the view has a slider.
        keys: the names of the keys, if they are not the queries.
        sums_to_one: whether every row must sum to 1; if not, to at most 1.
        title: the view's heading.

    """
    array = as_array(weights)
    array = _by_layer(array[None] if array.ndim == 2 else array)
    queries, of_keys = _labels(array, labels, keys, axes="layer head query key")
    return token_graph(
        array, queries, layers=range(len(array)), keys=of_keys, threshold=threshold, sums_to_one=sums_to_one,
        title=title,
    )  # fmt: skip


def _by_layer(weights: Array) -> Float[np.ndarray, "layer head query key"]:
    array = as_array(weights)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4:
        raise InputError(
            f"`weights` must have the axes [head query key] or [layer head query key]; got the shape {array.shape}. "
            "Select one text: weights[0]. With nn.MultiheadAttention, use average_attn_weights=False."
        )
    return array


def _labels(
    array: Float[np.ndarray, "..."], labels: Sequence[str] | None, keys: Sequence[str] | None, *, axes: str
) -> tuple[Sequence[str], Sequence[str] | None]:
    """The labels of queries and keys; None for the keys if they are the queries."""
    if array.ndim != len(axes.split()):
        raise InputError(
            f"`weights` must have the axes [{axes}]; got the shape {array.shape}. Select a text and a head: "
            "weights[0, 3]."
        )
    queries, across = array.shape[-2:]
    named = [str(number) for number in range(queries)] if labels is None else labels
    if keys is None and across != queries:
        keys = [str(number) for number in range(across)]
    return named, keys


def _numbered(labels: Sequence[str]) -> list[str]:
    """The names of positions at axes and in hover boxes: the number, and the label if it says more."""
    return [
        str(number) if label == str(number) else f"{number} {isolated(plotly_text(visible_token(label)))}"
        for number, label in enumerate(labels)
    ]


def _ticks(labels: Sequence[str]) -> dict[str, list[int] | list[str]]:
    return {"tickvals": list(range(len(labels))), "ticktext": list(labels)} if len(labels) <= _TICKS else {}
