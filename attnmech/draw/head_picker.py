"""A view with one figure per choice, such as per head, from which the reader chooses."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import plotly.io  # type: ignore[import-untyped]

from . import scripts
from .embed import View
from .packing import pack_texts


def head_picker(
    figure_of: Callable[..., go.Figure | Mapping[str, Any]],
    choices: Mapping[str, Sequence[int]],
    *,
    chosen: Mapping[str, int],
    title: str,
    reading: str,
) -> View:
    """Shows the figure of one choice, first of the one `chosen`, with a selector for each of `choices`, by name.

    `figure_of` takes a choice by name, and makes its figure or the properties of the figure.
    """
    first = _values(figure_of(**chosen))
    # Figures share most of their content: the layout, and often the tokens.
    changes = tuple(
        json.dumps(list(_changes(first, _values(figure_of(**dict(zip(choices, numbers, strict=True)))))))
        for numbers in product(*choices.values())
    )
    data = first | {
        "changes": pack_texts(changes),
        "choices": {name: list(numbers) for name, numbers in choices.items()},
        "chosen": {name: list(choices[name]).index(number) for name, number in chosen.items()},
        "title": title,
    }
    types = {trace["type"] for trace in first["data"]}
    return View("head_picker", title, reading, data, (scripts.plotly_for(types),))


def _values(figure: go.Figure | Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(plotly.io.to_json(figure, validate=False))
    return values


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
