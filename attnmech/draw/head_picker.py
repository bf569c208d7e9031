"""A view with one figure per head, from which the reader chooses."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from . import scripts
from .embed import View
from .packing import pack_texts


def head_picker(
    figure_of: Callable[[int, int], go.Figure],
    layers: Sequence[int],
    heads: int,
    *,
    layer: int,
    head: int,
    title: str,
    reading: str,
) -> View:
    """Shows the figure of one head, with selectors for layer and head.

    Args:
        figure_of: a function that makes the figure of a layer and a head.
        layers: the layers that can be chosen.
        heads: the number of heads in each layer.
        layer: the layer that is shown first, one of `layers`.
        head: the head that is shown first.
        title: the view's heading.
        reading: how to read it.

    """
    first = json.loads(figure_of(layer, head).to_json())
    # Figures share most of their content: the layout, and often the tokens.
    changes = tuple(
        json.dumps(list(_changes(first, json.loads(figure_of(at, of).to_json()))))
        for at in layers
        for of in range(heads)
    )
    chosen = {"layer": list(layers).index(layer), "head": head}
    data = first | {
        "changes": pack_texts(changes),
        "layers": list(layers),
        "heads": heads,
        "chosen": chosen,
        "title": title,
    }
    types = {trace["type"] for trace in first["data"]}
    return View("head_picker", title, reading, data, (scripts.plotly_for(types),))


def _changes(one: Any, other: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The paths at which `other` differs from `one`, with the values of `other`."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _changes(one[name], other[name], (*path, name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _changes(left, right, (*path, index))
    elif one != other:
        yield path, other
