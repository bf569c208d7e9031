"""The terms of each head's scores on one text: figures 2 and 3 of "Attention Focus Plots"."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ...basics.nouns import TEXT, Nouns
from ...draw.chart import ByChoice, Chart, Slot, height_of_rows, row_frame, token_axis, with_split
from ...draw.figure import Figure
from ...draw.head_maps import cell_map
from ...draw.style import FIGURE_STYLE, TERMS, marks_for, marks_of, term_order, term_style
from ...draw.text import labels_of, percent, plotly_text, signed, token_labels


def pair_map(values: Float[Tensor, "source_q source_k"], names: Sequence[str], *, top: int, label: str) -> go.Figure:
    """Draws the pairs of the `top` sources at the query and of the `top` at the key; the others are one row and column.

    >>> figure = pair_map(torch.tensor([[1.0, -3.0], [0.5, 0.0]]), ["A", "B"], top=1, label="contribution")
    >>> figure.data[0].z.tolist(), figure.data[0].x, figure.data[0].y
    ([[-3.0, 1.0], [0.0, 0.5]], ('B', '1 other'), ('A', '1 other'))
    """
    values, queries = _gathered(values, names, top)
    turned, keys = _gathered(values.T, names, top)
    shown = turned.T.double().numpy()
    figure = cell_map(
        shown,
        lambda row, column: (
            f"query: {queries[row]}<br>key: {keys[column]}<br>{signed(float(shown[row, column]), '.3f')}"
        ),
        label,
        signed=True,
        x=keys,
        y=queries,
    )
    figure.update_layout(height=max(280, 150 + 24 * len(queries)))
    figure.update_xaxes(title="source at the key", type="category", tickangle=-45)
    figure.update_yaxes(title={"text": "source at the query", "standoff": 12}, type="category")
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


TRIANGLE_CORNERS: Final = {"a": "position", "b": "key_bias", "c": "query_key"}  # a at the top, b left, c right
_LEGEND_ABOVE: Final = {"yref": "container", "y": 0.995, "yanchor": "top"}


def score_shares_chart(
    shares: Mapping[str, Float[np.ndarray, "layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
) -> Chart:
    """Both parts of figure 2 in one figure, for every head and rank: `triangle_chart` left, `bars_chart` right.

    `shares` are those of each term in the score of `keys[i]` in row i, from 0 to 1, after each term is shifted by its
    row minimum; NaN where undefined. Terms that this model lacks are left out of the mapping and count as 0. `keys` are
    -1 where a row has no key of that rank.
    """
    left = triangle_chart(shares, keys, tokens, key_tokens)
    right = bars_chart(shares, keys, tokens, key_tokens, framed=False)
    triangle, bars, before = left.template, right.template, len(left.template.data)
    figure = Figure([*triangle.data, *bars.data], layout=bars.layout)
    figure.update_traces(legend="legend2", selector={"type": "bar"})
    figure.update_layout(
        ternary=triangle.layout.ternary,
        ternary_domain={"x": [0.06, 0.4], "y": [0.1, 0.9]},
        xaxis_domain=[0.58, 1],
        legend=triangle.layout.legend.to_plotly_json(),
        legend2=bars.layout.legend.to_plotly_json() | _LEGEND_ABOVE | {"x": 0.58},
        margin={"t": 60},
        meta={"narrow": _SHARES_ONE_BELOW_THE_OTHER},
    )
    ranks = np.array([f"the key of rank {rank} is" for rank in range(keys.shape[3])], dtype=object)
    slots = [slot for slot in left.slots if slot.path.startswith("data.")]
    for slot in right.slots:
        _, place, rest = slot.path.split(".", 2)
        slots.append(replace(slot, path=f"data.{before + int(place)}.{rest}"))
    return Chart(figure, (*slots, Slot("layout.legend.title.text", ByChoice(ranks, ("rank",)))))


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
"""The layout of figure 2 in one column of a paper."""


def triangle_chart(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    nouns: Nouns = TEXT,
) -> Chart:
    """Figure 2, left, for every head and rank (and split): each row as a point between three terms of a key's score.

    Three traces, for keys at the query itself ("self"), at the first token ("first") and elsewhere ("other"), named in
    the traces' `meta`; in cross-attention "first", "last" and "other". Terms without a corner are left out, and the
    three terms are drawn relative to their sum.
    """
    labels, key_labels = labels_of(tokens, key_tokens, nouns)
    by_rank, key = _by_rank(shares, keys)
    defined = np.isfinite(np.stack([share.values for share in by_rank.values()])).all(axis=0)
    codes = np.where(defined, marks_of(key, None if key_tokens is None else len(key_tokens)), -1)
    marks = ByChoice(codes, with_split(codes, _OF_RANK, rest=1))
    queries = ByChoice(np.arange(len(tokens)), words=tuple(labels))
    in_words = (queries, ByChoice(key, _OF_RANK, words=tuple(key_labels)))
    nothing = ByChoice(np.zeros(len(tokens)))
    figure, slots = Figure(), []
    for code, (mark, style) in enumerate(marks_for(nouns, crosses=key_tokens is not None).items()):
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
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": 420,
        "legend": {"title": {"text": "the key is"}} | _LEGEND_ABOVE,
        "margin": {"t": 100, "b": 70, "l": 65, "r": 65},
        "ternary": {"sum": 1}
        | {
            f"{corner}axis": {
                "title": {"text": TERMS[term].label + ("" if term in shares else "<br>(not in this model)")},
                "color": TERMS[term].colour,
                "tickformat": ".0%",
                "tickvals": [0.25, 0.5, 0.75],
            }
            for corner, term in TRIANGLE_CORNERS.items()
        },
    }
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
    """The mean shares, over the rows, of the terms that have no corner."""
    means = []
    for name in names:
        known = shares[name].values[place]
        known = known[np.isfinite(known)]
        if known.size:
            means.append(f"{term_style(name).label} {percent(float(known.mean()))}")
    return f"outside the triangle, mean over rows: {', '.join(means)}" if means else ""


def bars_chart(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    framed: bool = True,
    nouns: Nouns = TEXT,
) -> Chart:
    """Figure 2, right, for every head and rank: the shares as one stacked bar per query; one trace per term."""
    labels, key_labels = labels_of(tokens, key_tokens, nouns)
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
    figure.layout = {
        "template": FIGURE_STYLE,
        "barmode": "stack",
        "bargap": 0.15,
        "height": height_of_rows(len(tokens)) + 110,
        "legend": {"title": {"text": "term of the score"}, "traceorder": "normal"},
        "xaxis": {
            "title": {"text": "share of the key's score"},
            "range": [0, 1.001],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "tickformat": ".0%",
        },
        "margin": {"r": 30},
        "yaxis": token_axis(labels, nouns.query_token, downwards=True) | {"showgrid": False},
        "shapes": [frame] if framed else [],
    }
    return Chart(figure, (*slots, *(follow if framed else ())), clicks={"query": "y"})


def key_terms_chart(
    terms: Mapping[str, Float[np.ndarray, "*split layer head key"]], tokens: Sequence[str], *, nouns: Nouns = TEXT
) -> Chart:
    """Figure 3 for every head (and split): each term that depends on the key alone, minus its mean over the keys.

    Adding one number to the scores of all keys leaves the softmax unchanged, so only the trend matters. One line per
    term (the trace's `meta`); without terms, the figure says so in a sentence.
    """
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
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": 420,
        "xaxis": token_axis(labels, nouns.key_token) | {"tickangle": -90, "visible": bool(terms)},
        "yaxis": {
            "title": {"text": "score before softmax,<br>minus the term's mean"},
            "zeroline": True,
            "visible": bool(terms),
            "hoverformat": "+.3f",
        },
    }
    if not terms:
        words = "No term of this model's score depends on the key alone."
        figure.add_annotation(text=words, xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False)
    return Chart(figure, tuple(slots))


_OF_RANK: Final = ("layer", "head", "rank")


def _by_rank(
    shares: Mapping[str, Float[np.ndarray, "*split layer head query rank"]],
    keys: Integer[np.ndarray, "layer head query rank"],
) -> tuple[dict[str, ByChoice], Integer[np.ndarray, "layer head rank query"]]:
    by_rank = {
        name: ByChoice(np.moveaxis(share, -1, -2), with_split(share, _OF_RANK, rest=1))
        for name, share in shares.items()
    }
    return by_rank, np.moveaxis(keys, -1, 2)
