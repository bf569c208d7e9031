"""Why one head looks where it looks, on one text: the attention map, the shares of the terms, the key's terms.

Figures 1 to 3 of the attention-focus report (formulas.md §1). Each `…_chart` takes the arrays of all layers and heads;
the function of the figure's own name takes those of one head and returns a plotly figure.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float, Int, Integer

from ..basics.arguments import option, strings
from ..basics.axes import KEY, QUERY, axis_label
from ..errors import InputError
from .chart import ByChoice, Chart, Slot, row_frame, with_split
from .figure import Figure
from .patterns import VALUE_WEIGHTED, as_array
from .style import (
    CROSS_MARKS,
    FIGURE_STYLE,
    MARKS,
    SCORE_COLOURS,
    TERMS,
    MarkStyle,
    term_order,
    term_style,
)
from .text import percent, token_labels

TRIANGLE_CORNERS: Final = {"a": "position", "b": "key_bias", "c": "query_key"}
"""Which term is at which corner of the ternary plot: a at the top, b on the left, c on the right."""

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


def of_heads(probabilities: Float[np.ndarray, "layer head ..."]) -> ByChoice:
    """Probabilities by layer and head, of which a page keeps the ratios; 0 is none."""
    return ByChoice(probabilities, ("layer", "head"), logarithmic=True)


MEASURES: Final = {
    "score": "score before softmax",
    "relative": "score minus the highest of its row",
    "probability": "probability after softmax",
}
"""What the cells of figure 1 may show."""

VALUE: Final = "value"
"""What they show besides on a page that has the norms of what keys write."""

PALEST_RELATIVE: Final = -8.0
"""A score so far below its row's highest has e⁻⁸ = 0.03 % of its weight; what is below has the palest colour."""

_RANGES: Final[dict[str, dict[str, float]]] = {
    "score": {},
    "relative": {"zmin": PALEST_RELATIVE, "zmax": 0},
    "probability": {"zmin": 0, "zmax": 1},
    "value": {"zmin": 0, "zmax": 1},
}


def attention_map(
    scores: Float[np.ndarray, "query key"],
    tokens: Sequence[str],
    *,
    outlined: int | None = None,
    measure: str = "score",
    pattern: Float[np.ndarray, "query key"] | None = None,
    keys: Sequence[str] | None = None,
) -> go.Figure:
    """Figure 1: the scores before softmax, one row per query, with the highest score of each row marked.

    >>> figure = attention_map(np.array([[0.5, np.nan], [0.1, 0.7]]), ["What", " does"])
    >>> [list(trace.x) for trace in figure.data[1:]]
    [['1 ·does'], [], []]

    Args:
        scores: score before softmax; hidden cells are NaN and stay blank.
        tokens: the text's tokens, which are both the queries and the keys.
        outlined: a query whose row gets a frame.
        measure: "score", or "relative" for each score minus the highest of its row, or "probability".
        pattern: probability after softmax, where that is the measure.
        keys: the key tokens in cross-attention; the query tokens by default.

    Returns:
        A heat map and one trace of marks for each of "self", "first" and "other" (the traces' `meta`); in
        cross-attention "first", "last" and "other". A row with fewer than two visible keys has no choice and gets no
        mark.

    """
    strings("tokens", tokens)
    option("measure", measure, MEASURES)
    if measure == "probability" and pattern is None:
        raise InputError('`pattern` must be given for the measure "probability"; got None.')
    given = {"scores": scores} if pattern is None else {"scores": scores, "pattern": pattern}
    arrays = {name: as_array(array, np.float64) for name, array in given.items()}
    for name, array in arrays.items():
        if array.ndim != 2:
            raise InputError(f"`{name}` must have the axes [query key]; got the shape {array.shape}.")
        for length, labels in zip(array.shape, (tokens, tokens if keys is None else keys), strict=True):
            _require_length(length, labels, name)
    chart = attention_chart(
        *(array[None, None] for array in arrays.values()),
        tokens=tokens,
        keys=keys,
        measures=[measure],
        framed=outlined is not None,
    )
    return chart.figure(layer=0, head=0, query=outlined or 0)


def attention_chart(
    scores: Float[np.ndarray, "layer head query key"],
    pattern: Float[np.ndarray, "layer head query key"] | None = None,
    norms: Float[np.ndarray, "layer head key"] | None = None,
    *,
    tokens: Sequence[str],
    keys: Sequence[str] | None = None,
    measures: Sequence[str] = tuple(MEASURES),
    framed: bool = True,
) -> Chart:
    """Figure 1 of every head; with several measures these are a choice, "measure", with `norms` one more of them."""
    labels, key_labels = token_labels(tokens), token_labels(tokens if keys is None else keys)
    of_head = ("layer", "head")
    highest_score = np.where(np.isnan(scores), -np.inf, scores).max(axis=-1)
    drawn = ByChoice(scores, of_head)
    probabilities = None if pattern is None else of_heads(pattern)
    values = {"score": drawn, "relative": drawn, "probability": probabilities, VALUE: probabilities}
    figure, slots = Figure(), []
    measures = measures if norms is None else (*measures, VALUE)
    for place, measure in enumerate(measures):
        figure.add_trace(_heat_map(measure, labels, key_labels, shown=place == 0))
        cells = values[measure]
        assert cells is not None
        less = ByChoice(highest_score, of_head) if measure == "relative" else None
        weights = of_heads(norms) if norms is not None and measure == VALUE else None
        slots.append(Slot(f"data.{place}.z", cells, less=less, weights=weights))
        if len(measures) > 1:
            one_hot = np.arange(len(measures)) == place
            slots.append(
                Slot(f"data.{place}.visible", ByChoice(one_hot.astype(int), ("measure",), words=(False, True)))
            )
    highest = highest_key(scores)
    marks = ByChoice(marks_of(highest, None if keys is None else len(keys)), of_head)
    top = ByChoice(highest, of_head, words=tuple(key_labels))
    queries = ByChoice(np.arange(len(tokens)), words=tuple(labels))
    for code, (mark, style) in enumerate(_marks(keys).items()):
        at = f"data.{len(figure.data)}"
        figure.add_scatter(
            mode="markers",
            marker={
                "color": style.colour,
                "symbol": style.symbol,
                "size": float(np.clip(420 / max(len(labels), len(key_labels)), 4, 11)),
                "line": {"color": "white", "width": 1},
            },
            name=style.label,
            hoverinfo="skip",
            showlegend=True,
            meta=mark,
        )
        slots += [Slot(f"{at}.x", top, where=marks, equals=code), Slot(f"{at}.y", queries, where=marks, equals=code)]
    frame, follow = row_frame(len(tokens))
    figure.update_layout(
        template=FIGURE_STYLE,
        height=_height_of_rows(len(tokens)) + 245,
        legend={"title": {"text": "highest score of a row (one key: no mark)"}},
        xaxis=_token_axis(key_labels, KEY) | {"showgrid": False, "tickangle": -90},
        yaxis=_token_axis(labels, QUERY, downwards=True) | {"showgrid": False},
        margin={"t": 125},
        shapes=[frame] if framed else [],
    )
    return Chart(figure, (*slots, *(follow if framed else ())), clicks={"query": "y"})


def _heat_map(measure: str, labels: list[str], keys: list[str], *, shown: bool) -> go.Heatmap:
    gap = 1 if max(len(labels), len(keys)) <= MOST_TOKENS_WITH_GAPS else 0
    words = {"score": "score", "relative": "below the highest", "probability": "probability", VALUE: "share"}[measure]
    paler = f" (palest from {PALEST_RELATIVE:g})".replace("-", "−") if measure == "relative" else ""
    return go.Heatmap(
        x=keys,
        y=labels,
        xgap=gap,
        ygap=gap,
        visible=shown,
        colorscale=SCORE_COLOURS,
        colorbar=_COLOUR_BAR_ABOVE
        | {"title": {"text": (MEASURES | {VALUE: VALUE_WEIGHTED.weight})[measure] + paler, "side": "bottom"}},
        zhoverformat=".3f",
        hovertemplate=f"query %{{y}}<br>key %{{x}}<br>{words} %{{z}}<extra></extra>",
        meta="scores" if measure == "score" else measure,
        **_RANGES[measure],
    )


def score_shares(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
    *,
    rank: int,
    key_tokens: Sequence[str] | None = None,
) -> go.Figure:
    """Figure 2 in one piece: `share_triangle` on the left, `share_bars` on the right.

    Args:
        shares: as in `share_triangle`.
        keys: as in `share_triangle`.
        tokens: the text's tokens.
        rank: the rank of the keys in their rows, 0 the highest score; the figure names it.
        key_tokens: as in `share_triangle`.

    """
    triangle = share_triangle(shares, keys, tokens, key_tokens)
    bars = share_bars(shares, keys, tokens, key_tokens=key_tokens)
    figure = Figure([*triangle.data, *bars.data], layout=bars.layout)
    figure.update_traces(legend="legend2", selector={"type": "bar"})
    figure.update_layout(
        ternary=triangle.layout.ternary,
        ternary_domain={"x": [0.06, 0.4], "y": [0.1, 0.9]},
        xaxis_domain=[0.58, 1],
        legend=triangle.layout.legend.to_plotly_json() | {"title": {"text": f"the key of rank {rank} is"}},
        legend2=bars.layout.legend.to_plotly_json() | _LEGEND_ABOVE | {"x": 0.58},
        margin={"t": 60},
        meta={"narrow": _SHARES_ONE_BELOW_THE_OTHER},
    )
    return figure


_SHARES_ONE_BELOW_THE_OTHER: Final = {
    "height": 600,
    "ternary.domain": {"x": [0.15, 0.85], "y": [0.63, 0.93]},
    "xaxis.domain": [0, 1],
    "yaxis.domain": [0, 0.5],
    "legend2.x": 0,
    "legend2.y": -0.22,
    "legend2.yref": "paper",
    "legend2.yanchor": "top",
}
"""Figure 2 in the column of a paper."""


def share_triangle(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
) -> go.Figure:
    """Figure 2, left: what makes up the score of one key per row, each row a point between three terms.

    Args:
        shares: per term the share of the score of `keys[i]` in row i, from 0 to 1, once each term is shifted by its
            row minimum; NaN where undefined. A term that is absent is not in this model: its share is 0.
        keys: the key in question of each row, say the one of the second highest score; -1 where there is none.
        tokens: the text's tokens.
        key_tokens: in cross-attention the tokens that `keys` are; by default `tokens`.

    Returns:
        One trace for each of "self", "first" and "other" (the traces' `meta`), by where the key is; in cross-attention
        "first", "last" and "other".
        A term beyond the three is left out, and the three are drawn relative to their sum.

    """
    _require_shares(shares, keys, tokens)
    return triangle_chart(*_as_one(shares, keys), tokens, key_tokens).figure(layer=0, head=0, rank=0)


def triangle_chart(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
) -> Chart:
    """Figure 2, left, of every head and rank, and of every split if there are several."""
    labels, key_labels = token_labels(tokens), token_labels(tokens if key_tokens is None else key_tokens)
    by_rank, key = _by_rank(shares, keys)
    defined = np.isfinite(np.stack([share.values for share in by_rank.values()])).all(axis=0)
    codes = np.where(defined, marks_of(key, None if key_tokens is None else len(key_tokens)), -1)
    marks = ByChoice(codes, with_split(codes, _OF_RANK, rest=1))
    queries = ByChoice(np.arange(len(tokens)), words=tuple(labels))
    in_words = (queries, ByChoice(key, _OF_RANK, words=tuple(key_labels)))
    nothing = ByChoice(np.zeros(len(tokens)))
    figure, slots = Figure(), []
    for code, (mark, style) in enumerate(_marks(key_tokens).items()):
        here: dict[str, Any] = {"where": marks, "equals": code}
        slots += [
            Slot(f"data.{code}.{corner}", by_rank.get(term, nothing), **here)
            for corner, term in TRIANGLE_CORNERS.items()
        ]
        slots.append(Slot(f"data.{code}.customdata", in_words, **here))
        figure.add_scatterternary(
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
        margin={"t": 100, "b": 70, "l": 65, "r": 65},
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
    )
    outside = [name for name in sorted(shares, key=term_order) if name not in TRIANGLE_CORNERS.values()]
    if outside:
        first = by_rank[outside[0]]
        texts = ByChoice.texts(first.over, first.values.shape[:-1], partial(_outside, by_rank, outside))
        figure.add_annotation(
            text="", xref="paper", yref="paper", x=0.5, y=-0.2, yanchor="top", showarrow=False, font={"size": 12}
        )
        slots.append(Slot("layout.annotations.0.text", texts))
    return Chart(figure, tuple(slots))


def _outside(shares: Mapping[str, ByChoice], names: Sequence[str], *place: int) -> str:
    """What the terms that have no corner hold, on average over the rows."""
    found = []
    for name in names:
        known = shares[name].values[place]
        known = known[np.isfinite(known)]
        if known.size:
            found.append(f"{term_style(name).label} {percent(float(known.mean()))}")
    return f"outside the triangle, mean over rows: {', '.join(found)}" if found else ""


def share_bars(
    shares: Mapping[str, Float[np.ndarray, " query"]],
    keys: Integer[np.ndarray, " query"],
    tokens: Sequence[str],
    *,
    outlined: int | None = None,
    key_tokens: Sequence[str] | None = None,
) -> go.Figure:
    """Figure 2, right: the shares of `share_triangle` as one stacked bar per query token.

    Args:
        shares: as in `share_triangle`; here terms beyond the three have their bars too.
        keys: the key in question of each row; -1 where there is none.
        tokens: the text's tokens.
        outlined: a query whose row gets a frame.
        key_tokens: as in `share_triangle`.

    Returns:
        One trace per term (the trace's `meta`).

    """
    _require_shares(shares, keys, tokens)
    chart = bars_chart(*_as_one(shares, keys), tokens, key_tokens, framed=outlined is not None)
    return chart.figure(layer=0, head=0, rank=0, query=outlined or 0)


def bars_chart(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    framed: bool = True,
) -> Chart:
    """Figure 2, right, of every head and rank."""
    labels, key_labels = token_labels(tokens), token_labels(tokens if key_tokens is None else key_tokens)
    by_rank, key = _by_rank(shares, keys)
    named = ByChoice(np.where(key < 0, len(key_labels), key), _OF_RANK, words=(*key_labels, ""))
    figure, slots = Figure(), []
    for place, name in enumerate(sorted(shares, key=term_order)):
        style = term_style(name)
        slots += [Slot(f"data.{place}.x", by_rank[name]), Slot(f"data.{place}.customdata", named)]
        figure.add_bar(
            y=labels,
            orientation="h",
            marker={"color": style.colour},
            name=style.label,
            hovertemplate=f"query %{{y}}<br>key %{{customdata}}<br>{style.label} %{{x:.1%}}<extra></extra>",
            showlegend=True,
            meta=name,
        )
    frame, follow = row_frame(len(tokens))
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
        shapes=[frame] if framed else [],
    )
    return Chart(figure, (*slots, *(follow if framed else ())), clicks={"query": "y"})


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
        One line per term (the trace's `meta`); without terms, a sentence that says so.

    """
    for name, values in terms.items():
        _require_length(len(values), tokens, name)
    chart = key_terms_chart({name: values[None, None] for name, values in terms.items()}, tokens)
    return chart.figure(layer=0, head=0)


def key_terms_chart(terms: Mapping[str, Float[np.ndarray, "*split layer head key"]], tokens: Sequence[str]) -> Chart:
    """Figure 3 of every head, and of every split if there are several."""
    labels = token_labels(tokens)
    figure, slots = Figure(), []
    for place, name in enumerate(sorted(terms, key=term_order)):
        style = term_style(name)
        known = np.isfinite(terms[name]).sum(axis=-1, keepdims=True)
        centred = terms[name] - np.nansum(terms[name], axis=-1, keepdims=True) / known.clip(1)
        slots.append(Slot(f"data.{place}.y", ByChoice(centred, with_split(centred, ("layer", "head"), rest=1))))
        figure.add_scatter(
            x=labels,
            mode="lines+markers",
            line={"color": style.colour, "dash": style.dash},
            marker={"symbol": style.symbol, "size": 5},
            name=style.label,
            hovertemplate=f"key %{{x}}<br>{style.label} %{{y}}<extra></extra>",
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
            "hoverformat": "+.3f",
        },
        annotations=[] if terms else [_no_key_terms()],
    )
    return Chart(figure, tuple(slots))


def highest_key(scores: Float[np.ndarray, "*head query key"]) -> Int[np.ndarray, "*head query"]:
    """The key of the highest score in each row; -1 where fewer than two keys are visible."""
    visible = np.isfinite(scores)
    return np.where(visible.sum(axis=-1) > 1, np.where(visible, scores, -np.inf).argmax(axis=-1), -1)


def marks_of(keys: Integer[np.ndarray, "*head query"], crossing: int | None = None) -> Int[np.ndarray, "*head query"]:
    """The place in `MARKS` of each query's key: the query itself, else the first token, else another; -1 without a key.

    In cross-attention, `crossing` is the number of keys, and the place is that in `CROSS_MARKS`: the first key, the
    last, or another.

    >>> marks_of(np.array([-1, 1, 0, 1])).tolist(), marks_of(np.array([-1, 1, 0, 3]), crossing=4).tolist()
    ([-1, 0, 1, 2], [-1, 2, 0, 1])
    """
    if crossing is not None:
        mark = np.where(keys == 0, 0, np.where(keys == crossing - 1, 1, 2))
        return np.where(keys < 0, -1, mark)
    mark = np.where(keys == np.arange(keys.shape[-1]), 0, np.where(keys == 0, 1, 2))
    return np.where(keys < 0, -1, mark)


def _marks(keys: Sequence[str] | None) -> Mapping[str, MarkStyle]:
    """How marks are drawn, by whether keys are tokens of another text."""
    return MARKS if keys is None else CROSS_MARKS


def _token_axis(labels: list[str], axis: str, *, downwards: bool = False) -> dict[str, object]:
    """An axis with one category per token: plotly thins out its labels to fit the room there is."""
    ends = [-0.5, len(labels) - 0.5]
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": labels,
        "range": ends[::-1] if downwards else ends,
        "title": {"text": axis_label(axis)},
        "tickfont": {"size": 11},
    }


def _height_of_rows(rows: int) -> int:
    """Pixels for the area of a figure with one row per token: some 14 per row, within what fits a screen."""
    return int(np.clip(14 * rows, 250, 800))


def _corner_title(term: str, in_model: bool) -> str:
    return TERMS[term].label + ("" if in_model else "<br>(not in this model)")


_OF_RANK: Final = ("layer", "head", "rank")


def _by_rank(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
) -> tuple[dict[str, ByChoice], Integer[np.ndarray, "layer head rank query"]]:
    """The shares and keys with the rank as a choice."""
    by_rank = {
        name: ByChoice(np.moveaxis(share, -1, -2), with_split(share, _OF_RANK, rest=1))
        for name, share in shares.items()
    }
    return by_rank, np.moveaxis(keys, -1, 2)


def _as_one(
    shares: Mapping[str, Float[np.ndarray, " query"]], keys: Integer[np.ndarray, " query"]
) -> tuple[dict[str, Float[np.ndarray, "1 1 query 1"]], Integer[np.ndarray, "1 1 query 1"]]:
    """Those of one head and rank as arrays of all."""
    return {name: share[None, None, :, None] for name, share in shares.items()}, keys[None, None, :, None]


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
