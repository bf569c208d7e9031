"""Why one head looks where it looks, on one text: the attention map, the shares of the terms, the key's terms.

Figures 1 to 3 of the attention-focus report (formulas.md §1). Each function takes plain arrays of one layer
and head and returns a plotly figure; the offline page fills the same figures with other heads' numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Integer

from attnmech.arguments import strings
from attnmech.axes import KEY, QUERY, axis_label
from attnmech.draw.figure import Figure
from attnmech.draw.patterns import as_array
from attnmech.draw.style import FIGURE_STYLE, MARKS, NEUTRAL, SCORE_COLOURS, TERMS, term_order, term_style
from attnmech.draw.text import token_labels
from attnmech.errors import InputError

TRIANGLE_CORNERS: Final = {"a": "position", "b": "key_bias", "c": "query_key"}
"""Which term stands at which corner of the ternary plot: a at the top, b on the left, c on the right."""

MOST_TOKENS_WITH_GAPS: Final = 64
"""Up to this many tokens the cells of a map stand apart; beyond it they would be mostly gap."""

_LEGEND_ABOVE: Final = {"yref": "container", "y": 0.995, "yanchor": "top"}
_COLOUR_BAR_ABOVE: Final = {
    "orientation": "h",
    "yref": "container",
    "y": 0.995,
    "yanchor": "top",
    "x": 0,
    "xanchor": "left",
    "len": 0.5,
    "thickness": 10,
}


def attention_map(
    scores: Float[np.ndarray, "query key"], tokens: Sequence[str], *, outlined: int | None = None
) -> go.Figure:
    """Figure 1: the scores before softmax, one row a query, with the highest score of each row marked.

    >>> figure = attention_map(np.array([[0.5, np.nan], [0.1, 0.7]]), ["What", " does"])
    >>> [list(trace.x) for trace in figure.data[1:]]
    [['1 ·does'], [], []]

    Args:
        scores: score before softmax; hidden cells are NaN and stay blank.
        tokens: the text's tokens, which are both the queries and the keys.
        outlined: a query whose row gets a frame.

    Returns:
        A heat map and one trace of marks for each of "self", "first" and "other" (the traces' `meta`). A row with
        fewer than two visible keys has no choice and gets no mark.

    """
    strings("tokens", tokens)
    scores = as_array(scores, np.float64)
    if scores.ndim != 2:
        raise InputError(f"`scores` must have the axes [query key]; got the shape {scores.shape}.")
    _require_length(scores.shape[0], tokens, "scores")
    _require_length(scores.shape[1], tokens, "scores")
    labels = token_labels(tokens)
    gap = 1 if len(tokens) <= MOST_TOKENS_WITH_GAPS else 0
    figure = Figure(
        go.Heatmap(
            x=labels,
            y=labels,
            z=scores,
            xgap=gap,
            ygap=gap,
            colorscale=SCORE_COLOURS,
            colorbar=_COLOUR_BAR_ABOVE | {"title": {"text": "score before softmax", "side": "bottom"}},
            hovertemplate="query %{y}<br>key %{x}<br>score %{z:.3f}<extra></extra>",
            meta="scores",
        )
    )
    highest = highest_key(scores)
    for mark, rows in rows_by_mark(highest).items():
        style = MARKS[mark]
        figure.add_scatter(
            x=[labels[key] for key in highest[rows]],
            y=[labels[query] for query in np.flatnonzero(rows)],
            mode="markers",
            marker={
                "color": style.colour,
                "symbol": style.symbol,
                "size": float(np.clip(420 / len(tokens), 4, 11)),
                "line": {"color": "white", "width": 1},
            },
            name=style.label,
            hoverinfo="skip",
            showlegend=True,
            meta=mark,
        )
    figure.update_layout(
        template=FIGURE_STYLE,
        height=_height_of_rows(len(tokens)) + 245,
        legend={"title": {"text": "highest score of a row (one key: no mark)"}},
        xaxis=_token_axis(labels, KEY) | {"showgrid": False, "tickangle": -90},
        yaxis=_token_axis(labels, QUERY, downwards=True) | {"showgrid": False},
        margin={"t": 125},
        shapes=[] if outlined is None else [_row_outline(outlined)],
    )
    return figure


def score_shares(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
    *,
    rank: int,
) -> go.Figure:
    """Figure 2 in one piece: `share_triangle` on the left, `share_bars` on the right.

    Args:
        shares: as in `share_triangle`.
        keys: as in `share_triangle`.
        tokens: the text's tokens.
        rank: the rank of the keys in their rows, 0 the highest score; the figure names it.

    """
    triangle = share_triangle(shares, keys, tokens)
    bars = share_bars(shares, keys, tokens)
    figure = Figure([*triangle.data, *bars.data], layout=bars.layout)
    figure.update_traces(legend="legend2", selector={"type": "bar"})
    figure.update_layout(
        ternary=triangle.layout.ternary,
        ternary_domain={"x": [0.06, 0.4], "y": [0.1, 0.9]},
        xaxis_domain=[0.58, 1],
        legend=triangle.layout.legend.to_plotly_json() | {"title": {"text": f"the key of rank {rank} is"}},
        legend2=bars.layout.legend.to_plotly_json() | _LEGEND_ABOVE | {"x": 0.58},
        margin={"t": 60},
    )
    return figure


def share_triangle(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
) -> go.Figure:
    """Figure 2, left: what makes the score of one key a row, each row a point between three terms.

    Args:
        shares: per term the share of the score of `keys[i]` in row i, from 0 to 1, once each term is shifted by its
            row minimum; NaN where undefined. A term that is absent is not in this model: its share is 0.
        keys: the key in question of each row, say the one of the second highest score; -1 where there is none.
        tokens: the text's tokens.

    Returns:
        One trace for each of "self", "first" and "other" (the traces' `meta`), by where the key stands.
        A term beyond the three is left out, and the three are drawn relative to their sum.

    """
    _require_shares(shares, keys, tokens)
    labels = token_labels(tokens)
    nothing = np.zeros(len(tokens))
    drawn = _defined_rows(shares)
    figure = Figure()
    for mark, rows in rows_by_mark(keys).items():
        queries = np.flatnonzero(rows & drawn)
        style = MARKS[mark]
        figure.add_scatterternary(
            **{corner: shares.get(term, nothing)[queries] for corner, term in TRIANGLE_CORNERS.items()},
            customdata=[[labels[query], labels[keys[query]]] for query in queries],
            mode="markers",
            marker={"color": style.colour, "symbol": style.symbol, "size": 9, "opacity": 0.8},
            name=style.label,
            hovertemplate="query %{customdata[0]}<br>key %{customdata[1]}<br>"
            + "<br>".join(f"{TERMS[term].label} %{{{corner}:.1%}}" for corner, term in TRIANGLE_CORNERS.items())
            + "<extra></extra>",
            showlegend=True,
            cliponaxis=False,
            meta=mark,
        )
    figure.update_layout(
        template=FIGURE_STYLE,
        height=420,
        legend={"title": {"text": "the key is"}} | _LEGEND_ABOVE,
        margin={"t": 100, "b": 60, "l": 65, "r": 65},
        ternary={"sum": 1}
        | {
            f"{corner}axis": {
                "title": {"text": _corner_title(term, term in shares)},
                "color": TERMS[term].colour,
                "tickformat": ".0%",
                "tickvals": [0.25, 0.5, 0.75],
            }
            for corner, term in TRIANGLE_CORNERS.items()
        },
        meta=TRIANGLE_CORNERS,
    )
    return figure


def share_bars(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
    *,
    outlined: int | None = None,
) -> go.Figure:
    """Figure 2, right: the shares of `share_triangle` as one stacked bar a query token.

    Args:
        shares: as in `share_triangle`; here terms beyond the three have their bars too.
        keys: the key in question of each row; -1 where there is none.
        tokens: the text's tokens.
        outlined: a query whose row gets a frame.

    Returns:
        One trace a term (the trace's `meta`).

    """
    _require_shares(shares, keys, tokens)
    labels = token_labels(tokens)
    figure = Figure()
    for name in sorted(shares, key=term_order):
        style = term_style(name)
        figure.add_bar(
            x=shares[name],
            y=labels,
            customdata=[labels[key] if key >= 0 else "" for key in keys],
            orientation="h",
            marker={"color": style.colour},
            name=style.label,
            hovertemplate=f"query %{{y}}<br>key %{{customdata}}<br>{style.label} %{{x:.1%}}<extra></extra>",
            showlegend=True,
            meta=name,
        )
    figure.update_layout(
        template=FIGURE_STYLE,
        barmode="stack",
        bargap=0.15,
        height=_height_of_rows(len(tokens)) + 110,
        legend={"title": {"text": "term of the score"}, "traceorder": "normal"},
        xaxis={
            "title": {"text": "share of the key's score"},
            "range": [0, 1.001],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "tickformat": ".0%",
        },
        margin={"r": 30},
        yaxis=_token_axis(labels, QUERY, downwards=True) | {"showgrid": False},
        shapes=[] if outlined is None else [_row_outline(outlined)],
    )
    return figure


def key_terms(terms: Mapping[str, Float[np.ndarray, " key"]], tokens: Sequence[str]) -> go.Figure:
    """Figure 3: the terms that depend on the key alone, along the keys, each minus its mean over the keys.

    Adding the same number to all keys changes nothing after the softmax, so only the trend is of interest.

    >>> figure = key_terms({"position": np.array([1.0, 3.0])}, ["What", " does"])
    >>> figure.data[0].y.tolist()
    [-1.0, 1.0]

    Args:
        terms: the term's value at each key, in units of the score before softmax. May be empty.
        tokens: the text's tokens.

    Returns:
        One line a term (the trace's `meta`); without terms, a sentence that says so.

    """
    for name, values in terms.items():
        _require_length(len(values), tokens, name)
    labels = token_labels(tokens)
    figure = Figure()
    for name in sorted(terms, key=term_order):
        style = term_style(name)
        figure.add_scatter(
            x=labels,
            y=terms[name] - terms[name].mean(),
            mode="lines+markers",
            line={"color": style.colour, "dash": style.dash},
            marker={"symbol": style.symbol, "size": 5},
            name=style.label,
            hovertemplate=f"key %{{x}}<br>{style.label} %{{y:+.3f}}<extra></extra>",
            showlegend=True,
            meta=name,
        )
    figure.update_layout(
        template=FIGURE_STYLE,
        height=420,
        xaxis=_token_axis(labels, KEY) | {"tickangle": -90, "visible": bool(terms)},
        yaxis={
            "title": {"text": "score before softmax,<br>minus the term's mean"},
            "zeroline": True,
            "visible": bool(terms),
        },
        annotations=[] if terms else [_no_key_terms()],
    )
    return figure


def highest_key(scores: Float[np.ndarray, "query key"]) -> Integer[np.ndarray, " query"]:
    """The key of the highest score in each row; -1 where fewer than two keys are visible."""
    visible = np.isfinite(scores)
    return np.where(visible.sum(axis=1) > 1, np.where(visible, scores, -np.inf).argmax(axis=1), -1)


def rows_by_mark(keys: Integer[np.ndarray, " query"]) -> dict[str, Bool[np.ndarray, " query"]]:
    """Which rows' key is the query itself, else the first token, else another one; no row with key -1.

    >>> {mark: rows.nonzero()[0].tolist() for mark, rows in rows_by_mark(np.array([-1, 1, 0, 1])).items()}
    {'self': [1], 'first': [2], 'other': [3]}
    """
    query = np.arange(len(keys))
    is_self = keys == query
    return {"self": is_self, "first": (keys == 0) & ~is_self, "other": (keys > 0) & ~is_self}


def _token_axis(labels: list[str], axis: str, *, downwards: bool = False) -> dict[str, object]:
    """An axis with one category a token: plotly thins its labels out by the room there is."""
    ends = [-0.5, len(labels) - 0.5]
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": labels,
        "range": ends[::-1] if downwards else ends,
        "title": {"text": axis_label(axis)},
        "tickfont": {"size": 11},
    }


def _row_outline(query: int) -> dict[str, object]:
    """A frame around the row of one query."""
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": query - 0.5,
        "y1": query + 0.5,
        "line": {"color": NEUTRAL, "width": 1.5},
    }


def _height_of_rows(rows: int) -> int:
    """Pixels for the area of a figure with one row a token: some 14 a row, within what fits a screen."""
    return int(np.clip(14 * rows, 250, 800))


def _corner_title(term: str, in_model: bool) -> str:
    return TERMS[term].label + ("" if in_model else "<br>(not in this model)")


def _defined_rows(shares: Mapping[str, Float[np.ndarray, " query"]]) -> Bool[np.ndarray, " query"]:
    defined: Bool[np.ndarray, " query"] = np.isfinite(np.stack(list(shares.values()))).all(axis=0)
    return defined


def _no_key_terms() -> dict[str, object]:
    return {
        "text": "No term of this model's score depends on the key alone.",
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
    }


def _require_shares(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
) -> None:
    if not shares:
        raise InputError("`shares` must hold at least one term, such as 'query_key'; got none.")
    for name, share in {"keys": keys, **shares}.items():
        _require_length(len(share), tokens, name)


def _require_length(length: int, tokens: Sequence[str], name: str) -> None:
    if length != len(tokens):
        raise InputError(
            f"`{name}` must have one entry for each of the {len(tokens)} tokens; got {length}. "
            "Give the tokens of the text that the numbers come from."
        )
