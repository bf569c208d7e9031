"""The colours, symbols and words of all figures.

The hues come from the Okabe-Ito palette (safe for colour-blind readers), adjusted where needed to be legible on white
and on near-black backgrounds. Every mark also has its own symbol, and every line its own dash.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Int, Integer

from ..basics.nouns import TEXT, Nouns


@dataclass(frozen=True)
class TermStyle:
    """The style in which one term of the score is drawn."""

    label: str
    colour: str
    dash: str
    symbol: str


TERMS: Final = {
    "position": TermStyle("position", "#2b8cc4", "solid", "circle"),
    "key_bias": TermStyle("key bias", "#e69f00", "dash", "square"),
    "query_key": TermStyle("query-key", "#cc79a7", "dot", "diamond"),
}
"""The three native terms that can move attention between keys, in the order of the stacked bars."""


_RELATIVE: Final = {
    "content_to_position": TermStyle("content to position", "#a6611a", "longdash", "cross"),
    "position_to_content": TermStyle("position to content", "#018571", "longdashdot", "triangle-up"),
}
"""DeBERTa's terms, which depend on distance and on the content of the query or the key."""


def term_style(name: str) -> TermStyle:
    """The style of a term; a term that only some architectures have is grey.

    >>> term_style("softcap").label
    'softcap'
    """
    return (TERMS | _RELATIVE).get(name) or TermStyle(name.replace("_", " "), "#8c8c8c", "dashdot", "x")


def term_order(name: str) -> int:
    """The index of a term among the stacked bars; terms that only some architectures have come last."""
    order = [*TERMS, *_RELATIVE]
    return order.index(name) if name in order else len(order)


@dataclass(frozen=True)
class MarkStyle:
    """The style of a key by its position: `symbol` is plotly's name of the shape, `sign` the shape as a character."""

    label: str
    colour: str
    symbol: str
    sign: str


def marks_for(nouns: Nouns, *, crosses: bool = False) -> dict[str, MarkStyle]:
    """The marks of keys by their position.

    In cross-attention no key is the query itself, and the last key has a mark: many source texts end with a special
    token.
    """
    if crosses:
        return {
            "first": MarkStyle(f"the first {nouns.key_token}", "#9a5fd6", "diamond", "◆"),
            "last": MarkStyle(f"the last {nouns.key_token}", "#009e73", "triangle-up", "▲"),
            "other": MarkStyle(f"another {nouns.key_token}", "#d55e00", "square", "■"),
        }
    return {
        "self": MarkStyle("itself", "#009e73", "circle", "●"),
        "first": MarkStyle(f"the {nouns.first}", "#9a5fd6", "diamond", "◆"),
        "other": MarkStyle(f"another {nouns.token}", "#d55e00", "square", "■"),
    }


MARKS: Final = marks_for(TEXT)


def marks_of(keys: Integer[np.ndarray, "*head query"], crossing: int | None = None) -> Int[np.ndarray, "*head query"]:
    """Returns the index in `MARKS` of each query's key: the query itself, the first token, or another; -1 without a
    key.

    In cross-attention, `crossing` is the number of keys, and the marks are the first key, the last, or another.

    >>> marks_of(np.array([-1, 1, 0, 1])).tolist(), marks_of(np.array([-1, 1, 0, 3]), crossing=4).tolist()
    ([-1, 0, 1, 2], [-1, 2, 0, 1])
    """
    if crossing is not None:
        mark = np.where(keys == 0, 0, np.where(keys == crossing - 1, 1, 2))
        return np.where(keys < 0, -1, mark)
    mark = np.where(keys == np.arange(keys.shape[-1]), 0, np.where(keys == 0, 1, 2))
    return np.where(keys < 0, -1, mark)


SCORE_COLOURS: Final = ["#dce7f0", "#a9c5dc", "#6f9cc1", "#40739f", "#1f4a73"]
"""Colours from low to high scores: one hue of decreasing lightness, with ends that differ from white and near-black."""

NEUTRAL: Final = "#757575"
"""The colour of text and outlines, with the same contrast on white and on near-black."""

BAR_ABOVE: Final = {"orientation": "h", "x": 0, "xanchor": "left", "len": 0.5, "thickness": 10}
"""A bar of colours above a figure, from its left edge; each figure says at which height."""

FIGURE_STYLE: Final = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": NEUTRAL, "activecolor": "#2b8cc4"},
        "xaxis": {"automargin": True, "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False},
        "yaxis": {"automargin": True, "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1,
            "xanchor": "left",
            "yanchor": "bottom",
            "title": {"side": "top"},
            "itemsizing": "constant",
        },
        "ternary": {
            "bgcolor": "rgba(0,0,0,0)",
            **{
                axis: {"gridcolor": "rgba(128,128,128,0.25)", "linecolor": NEUTRAL}
                for axis in ("aaxis", "baxis", "caxis")
            },
        },
    }
)
"""The template of all figures: transparent paper, a light grid, a legend above the figure."""
