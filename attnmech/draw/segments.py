"""Maps with segments (or tokens) of a text as rows and columns."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from .head_maps import cell_map
from .text import isolated, plotly_text, signed, visible_token

_LABEL: Final = 18  # the largest number of a segment's characters in a tick label

MOST_LABELS: Final = 40  # the largest number of segments along an axis at which every segment has a tick label


def segment_labels(segments: Sequence[str]) -> list[str]:
    """Returns a readable name for each segment: its number and its first characters.

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
    label: str,
    title: str,
    signs: bool = False,
    unit: str = "segment",
) -> go.Figure:
    """Draws query segments × key segments of one head; cells that are NaN stay empty.

    `label` names the numbers, `signs` says whether they can be below 0, and `unit` names the rows and columns.

    >>> figure = segment_map(np.array([[1.0, 0.0], [0.4, 0.6]]), ["0 a", "1 b"], label="share", title="L0H1")
    >>> figure.data[0].text[1][0]
    '1 b → 0 a<br>0.4'
    """
    count = len(labels)

    def hover(query: int, key: int) -> str:
        value = float(values[query, key])
        return f"{labels[query]} → {labels[key]}<br>{signed(value, '.3g') if signs else f'{value:.3g}'}"

    figure = cell_map(values, hover, label, signed=signs, gap=1 if count <= MOST_LABELS else 0)
    ticks = {"tickvals": list(range(count)), "ticktext": list(labels)} if count <= MOST_LABELS else {}
    numbers = {**ticks, "ticktext": [str(number) for number in range(count)]} if ticks else {}
    figure.update_layout(height=max(280, 130 + min(24 * count, 700)))
    figure.update_xaxes(title=f"key {unit} ({title})", tickangle=0, **numbers)
    figure.update_yaxes(title={"text": f"query {unit}", "standoff": 12}, **ticks)
    return figure
