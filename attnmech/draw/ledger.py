"""The ledger of one row: for one query, the terms of each key's score, and the probability after softmax."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float, Int

from ..basics.arguments import index_of, option, shown, strings, whole_number
from ..basics.nouns import TEXT, Nouns
from ..basics.public import public
from ..errors import InputError
from .chart import ByChoice, Chart, Slot, with_split
from .figure import Figure
from .patterns import as_array
from .style import FIGURE_STYLE, NEUTRAL, term_order, term_style
from .text import labels_of

_HATCHES: Final = {"query_bias": "/", "constant": ".", "softcap": "x"}  # the hatches that distinguish grey terms

_PIXELS_OF_A_ROW: Final = 26

MOST_KEYS: Final = 12  # the default number of keys drawn per row

REFERENCES: Final = {
    "mean": "score before softmax<br>− the row's mean",
    "zero": "score before softmax",
    "runner_up": "score before softmax<br>− the runner-up's",
}
"""The references that can be subtracted from a row's terms; subtracting one number from all keys changes no
probability. On a page, the first is shown first: as computed, what all keys share can dwarf what they differ in.
"""

ROW_READING: Final = (
    "The keys that the selected query attends to most. Left: the terms of each score, stacked from 0; the ring is "
    "their sum, the score. Right: the attention that each key receives."
)
"""How to read a row's ledger."""


@public
def row_ledger(
    terms: Mapping[str, Float[np.ndarray, " key"]],
    score: Float[np.ndarray, " key"],
    pattern: Float[np.ndarray, " key"],
    tokens: Sequence[str],
    *,
    query: int,
    top: int = MOST_KEYS,
    against: str = "zero",
    keys: Sequence[str] | None = None,
) -> go.Figure:
    """Draws the keys to which one query attends most: score = Σ terms on the left, the probability on the right.

    >>> terms = {"query_key": np.array([1.0, 2.0]), "position": np.array([-0.5, 0.5])}
    >>> figure = row_ledger(terms, np.array([0.5, 2.5]), np.array([0.12, 0.88]), ["What", " does"], query=1)
    >>> [(trace.meta, trace.x.tolist()) for trace in figure.data]
    [('position', [0.5, -0.5]), ('query_key', [2.0, 1.0]), ('score', [2.5, 0.5]), ('probability', [0.88, 0.12])]

    Args:
        terms: each term at each key, without the mask, in units of the score before softmax; they sum to `score`.
        score: score before softmax; NaN at hidden keys, which are never shown.
        pattern: probability after softmax.
        tokens: the text's tokens, which are both the queries and the keys.
        query: the position of the query.
        top: the largest number of keys drawn, in order of falling probability.
        against: the reference that is subtracted from the terms and the score: "zero"; "mean", their means over the
            visible keys; or "runner_up", their values at the key with the second highest probability.
        keys: the key tokens in cross-attention; the query tokens by default.

    Returns:
        One trace of stacked bars per term, the marks of the scores ("score") and the bars of "probability", named by
        their `meta`.

    """
    strings("tokens", tokens)
    option("against", against, REFERENCES)
    if not isinstance(terms, Mapping):
        raise InputError(f"`terms` must be arrays by the names of the terms; got {shown(terms)}.")
    terms = {name: as_array(term, np.float64) for name, term in terms.items()}
    score, pattern = as_array(score, np.float64), as_array(pattern, np.float64)
    top = whole_number("top", top, least=1)
    _require_row(terms, score, pattern, tokens if keys is None else keys)
    query = index_of("query", query, len(tokens), f"the text has {len(tokens)} tokens")
    chart = ledger_chart(
        {name: term[None, None, None] for name, term in terms.items()},
        score[None, None, None],
        pattern[None, None, None],
        tokens,
        keys=keys,
        queries=[query],
        top=top,
        references=[against],
    )
    return chart.figure(layer=0, head=0, query=0, against=0)


def ledger_chart(
    terms: Mapping[str, Float[np.ndarray, "*split layer head query_or_1 key_or_1"]],
    scores: Float[np.ndarray, "layer head query key"],
    pattern: Float[np.ndarray, "layer head query key"],
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    queries: Sequence[int] | None = None,
    top: int = MOST_KEYS,
    references: Sequence[str] = tuple(REFERENCES),
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws the ledger of every row of every head; `queries` are the positions of the rows, by default all.

    Several `references` become a choice, "against". Terms may have a leading axis "split".
    """
    labels, key_labels = labels_of(tokens, keys, nouns)
    ranked = likeliest(scores, pattern)
    order = ranked[..., :top]
    drawn_keys = np.where(np.isfinite(np.take_along_axis(scores, order, axis=-1)), order, -1)

    def at_keys(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "*split layer head query row"]:
        return np.where(drawn_keys < 0, np.nan, along_keys(of_every_cell(values, scores), order))

    names = sorted(terms, key=term_order)
    drawn = {name: at_keys(terms[name]) for name in names} | {"score": at_keys(scores)}
    probability = at_keys(pattern)
    bars = ByChoice(probability, _OF_ROW)
    rounded = np.rint(1000 * np.nan_to_num(probability)).astype(np.int64) + 1
    thousandth = np.where(probability < 0.001, (probability > 0).astype(np.int64), rounded)
    written = ByChoice(np.where(np.isnan(probability), -1, thousandth), _OF_ROW, words=_THOUSANDTHS)
    over = {name: with_split(values, _OF_ROW, rest=1) for name, values in drawn.items()}
    in_words = (*(ByChoice(values, over[name], digits=3) for name, values in drawn.items()), written)
    rows = ByChoice(drawn_keys, _OF_ROW, words=tuple(key_labels))
    hover = [
        "key %{y}",
        *(f"{term_style(name).label} %{{customdata[{place}]}}" for place, name in enumerate(names)),
        f"score %{{customdata[{len(names)}]}}",
        f"probability %{{customdata[{len(names) + 1}]}}",
    ]
    figure = Figure()
    shared: dict[str, Any] = {"hovertemplate": "<br>".join(hover) + "<extra></extra>"}
    for name in names:
        style = term_style(name)
        figure.add_bar(
            **shared,
            orientation="h",
            marker={"color": style.colour, "pattern": {"shape": _HATCHES.get(name, ""), "fillmode": "overlay"}},
            name=style.label,
            showlegend=True,
            meta=name,
        )
    figure.add_scatter(
        **shared,
        mode="markers",
        marker={"symbol": "circle", "size": 9, "color": "white", "line": {"color": "black", "width": 2}},
        name="sum = score",
        showlegend=True,
        meta="score",
    )
    figure.add_bar(
        **shared,
        xaxis="x2",
        orientation="h",
        marker={"color": NEUTRAL},
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        meta="probability",
    )
    slots = []
    for place, (name, values) in enumerate((drawn | {"probability": probability}).items()):
        less = None if name == "probability" else _at_reference(terms.get(name, scores), scores, ranked, references)
        x = bars if name == "probability" else ByChoice(values, over[name])
        slots += [
            Slot(f"data.{place}.x", x, less=less, where=rows),
            Slot(f"data.{place}.y", rows, where=rows),
            Slot(f"data.{place}.customdata", in_words, where=rows),
        ]
    slots.append(Slot(f"data.{len(drawn)}.text", written, where=rows))
    figure.layout = _LAYOUT
    figure.update_yaxes(title_text=nouns.key_token)
    return Chart(figure, (*slots, *_slots_of_layout(labels, scores, probability, rows, queries, references)))


def likeliest(
    scores: Float[np.ndarray, "*head query key"], pattern: Float[np.ndarray, "*head query key"]
) -> Int[np.ndarray, "*head query key"]:
    """Returns the keys of each row by falling probability, ties in order of position; hidden keys last."""
    order: Int[np.ndarray, "*head query key"] = np.argsort(
        np.where(np.isfinite(scores), -pattern, np.inf), axis=-1, kind="stable"
    )
    return order


def widest_row(scores: Float[np.ndarray, "query key"], pattern: Float[np.ndarray, "query key"]) -> int:
    """The row whose drawn keys differ most in their scores; the first of equal ones.

    >>> widest_row(np.array([[1, np.nan], [5, 2]]), np.array([[1, 0], [0.95, 0.05]]))
    1
    """
    drawn = np.take_along_axis(scores, likeliest(scores, pattern)[:, :MOST_KEYS], axis=-1)
    seen = np.isfinite(drawn)
    reach = np.where(seen, drawn, -np.inf).max(axis=-1) - np.where(seen, drawn, np.inf).min(axis=-1)
    return int(reach.argmax())


_OF_ROW: Final = ("layer", "head", "query")


def _at_reference(
    term: Float[np.ndarray, "*split layer head query_or_1 key_or_1"],
    scores: Float[np.ndarray, "layer head query key"],
    ranked: Int[np.ndarray, "layer head query key"],
    references: Sequence[str],
) -> ByChoice | None:
    if tuple(references) == ("zero",):
        return None
    visible = np.isfinite(scores)
    values = of_every_cell(term, scores)
    second = np.where(visible.sum(axis=-1) > 1, ranked[..., min(1, ranked.shape[-1] - 1)], ranked[..., 0])
    by_reference = {
        "zero": np.zeros(values.shape[:-1]),
        "mean": np.where(visible, values, 0.0).sum(axis=-1) / visible.sum(axis=-1).clip(1),
        "runner_up": along_keys(values, second[..., None])[..., 0],
    }
    stacked = np.stack([by_reference[name] for name in references], axis=-1)
    return ByChoice(stacked, with_split(stacked, (*_OF_ROW, "against"), rest=0))


def of_every_cell(
    term: Float[np.ndarray, "..."], scores: Float[np.ndarray, "layer head query key"]
) -> Float[np.ndarray, "*split layer head query key"]:
    """A term at every query and key."""
    return np.broadcast_to(term, (*term.shape[: term.ndim - scores.ndim], *scores.shape))


def along_keys(
    values: Float[np.ndarray, "*split layer head query key"], places: Int[np.ndarray, "layer head query place"]
) -> Float[np.ndarray, "*split layer head query place"]:
    """Values at some keys of each row."""
    return np.take_along_axis(values, places.reshape((1,) * (values.ndim - places.ndim) + places.shape), axis=-1)


def _slots_of_layout(
    labels: Sequence[str],
    scores: Float[np.ndarray, "layer head query key"],
    probability: Float[np.ndarray, "layer head query row"],
    rows: ByChoice,
    queries: Sequence[int] | None,
    references: Sequence[str],
) -> tuple[Slot, ...]:
    count = (rows.values >= 0).sum(axis=-1)
    visible = np.isfinite(scores).sum(axis=-1)
    together = np.nansum(probability, axis=-1)
    looking = range(len(labels)) if queries is None else queries

    def title(*place: int) -> str:
        number, text = labels[looking[place[2]]].split(" ", 1)
        summary = f"{count[place]} of its {visible[place]} visible keys, with {together[place]:.3f} of the attention"
        return f"query {number} “{text}”<br>{summary} in total"

    ends = np.stack([count - 0.5, np.full(count.shape, -0.5)], axis=-1)
    # The space on the right is for the numbers beside the bars.
    reach = np.stack([np.zeros(count.shape), 1.5 * np.nan_to_num(probability).max(axis=-1)], axis=-1)
    against = np.array([REFERENCES[name] for name in references], dtype=object)
    return (
        Slot("layout.title.text", ByChoice.texts(_OF_ROW, count.shape, title)),
        Slot("layout.height", ByChoice(_PIXELS_OF_A_ROW * count + 200, _OF_ROW)),
        Slot("layout.yaxis.categoryarray", rows, where=rows),
        Slot("layout.yaxis.range", ByChoice(ends, _OF_ROW)),
        Slot("layout.xaxis2.range", ByChoice(reach, _OF_ROW)),
        Slot("layout.xaxis.title.text", ByChoice(against, ("against",))),
    )


_LINE_AT_0: Final = {"zeroline": True, "zerolinecolor": NEUTRAL, "zerolinewidth": 1}

_LAYOUT: Final = {
    "template": FIGURE_STYLE,
    "barmode": "relative",
    "bargap": 0.25,
    "title": {"font": {"size": 13}, "x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"t": 16}},
    # Below the figure, where it has room: on a phone, each entry takes a line.
    "legend": {"traceorder": "normal", "yref": "container", "y": 0, "yanchor": "bottom"},
    "xaxis": {"title": {}, "domain": [0, 0.7], **_LINE_AT_0},
    "xaxis2": {
        "title": {"text": "probability<br>after softmax"},
        "domain": [0.76, 1],
        "nticks": 3,
        "anchor": "y",
        **_LINE_AT_0,
    },
    "yaxis": {"type": "category", "categoryorder": "array", "title": {"standoff": 8}, "showgrid": False},
    "margin": {"t": 70, "r": 34},
}


_THOUSANDTHS: Final = ("0", "&lt;0.001", *(f"{number / 1000:.3f}" for number in range(1, 1001)))
"""Probabilities with three digits after the point, for a plotly string; "<0.001" for those between 0 and 0.001."""


def _require_row(
    terms: Mapping[str, Float[np.ndarray, " key"]],
    score: Float[np.ndarray, " key"],
    pattern: Float[np.ndarray, " key"],
    tokens: Sequence[str],
) -> None:
    if not terms:
        raise InputError("`terms` must hold at least one term, such as 'query_key'; got none.")
    for name, values in {"score": score, "pattern": pattern, **terms}.items():
        if values.shape != (len(tokens),):
            raise InputError(
                f"`{name}` must have one number for each of the {len(tokens)} tokens; got the shape {values.shape}. "
                "Pass the tokens of the text that the numbers come from."
            )
    if not np.isfinite(score).any():
        raise InputError("`score` must be a number for at least one key; every key is NaN (hidden).")
