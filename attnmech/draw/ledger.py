"""The ledger of one row: for one query, what each key's score is made of, and what the softmax makes of the scores."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float, Integer

from attnmech.arguments import shown, strings, whole_number
from attnmech.axes import KEY, axis_label
from attnmech.draw.figure import Figure
from attnmech.draw.patterns import as_array
from attnmech.draw.style import FIGURE_STYLE, NEUTRAL, term_order, term_style
from attnmech.draw.text import signed, token_labels
from attnmech.errors import InputError, index_of

_HATCHES: Final = {"query_bias": "/", "constant": ".", "softcap": "x"}
"""What tells grey terms apart."""

_PIXELS_OF_A_ROW: Final = 26


def row_ledger(
    terms: Mapping[str, Float[np.ndarray, " key"]],
    score: Float[np.ndarray, " key"],
    pattern: Float[np.ndarray, " key"],
    tokens: Sequence[str],
    *,
    query: int,
    top: int = 12,
) -> go.Figure:
    """The keys that one query looks at most: score = Σ terms on the left, its probability on the right.

    >>> terms = {"query_key": np.array([1.0, 2.0]), "position": np.array([-0.5, 0.5])}
    >>> figure = row_ledger(terms, np.array([0.5, 2.5]), np.array([0.12, 0.88]), ["What", " does"], query=1)
    >>> [(trace.meta, trace.x.tolist()) for trace in figure.data]
    [('position', [0.5, -0.5]), ('query_key', [2.0, 1.0]), ('score', [2.5, 0.5]), ('probability', [0.88, 0.12])]

    Args:
        terms: each term at each key, in units of the score before softmax; they add up to `score`. Without the mask.
        score: score before softmax; NaN at hidden keys, which are never shown.
        pattern: probability after softmax.
        tokens: the text's tokens, which are both the queries and the keys.
        query: the position of the token that looks.
        top: at most so many keys, those of the highest probability, the highest first.

    Returns:
        A stacked bar trace a term, the marks of the scores ("score") and the bars of "probability", by their `meta`.

    """
    strings("tokens", tokens)
    if not isinstance(terms, Mapping):
        raise InputError(f"`terms` must be arrays by the names of the terms; got {shown(terms)}.")
    terms = {name: as_array(term, np.float64) for name, term in terms.items()}
    score, pattern = as_array(score, np.float64), as_array(pattern, np.float64)
    top = whole_number("top", top, least=1)
    _require_row(terms, score, pattern, tokens)
    query = index_of("query", query, len(tokens), f"the text has {len(tokens)} tokens")
    keys = _likeliest(score, pattern, top)
    labels = token_labels(tokens)
    title = _title(labels[query], visible=int(np.isfinite(score).sum()), shown=pattern[keys])
    terms = {name: terms[name][keys] for name in sorted(terms, key=term_order)}
    score, pattern = score[keys], pattern[keys]
    rows = {"y": [labels[key] for key in keys], "hovertemplate": "%{hovertext}<extra></extra>"}
    rows["hovertext"] = _in_words(rows["y"], terms, score, pattern)
    figure = Figure()
    for name, values in terms.items():
        style = term_style(name)
        figure.add_bar(
            x=values,
            **rows,
            orientation="h",
            marker={"color": style.colour, "pattern": {"shape": _HATCHES.get(name, ""), "fillmode": "overlay"}},
            name=style.label,
            showlegend=True,
            meta=name,
        )
    figure.add_scatter(
        x=score,
        **rows,
        mode="markers",
        marker={"symbol": "circle", "size": 9, "color": "white", "line": {"color": "black", "width": 2}},
        name="sum = score",
        showlegend=True,
        meta="score",
    )
    figure.add_bar(
        x=pattern,
        **rows,
        xaxis="x2",
        orientation="h",
        marker={"color": NEUTRAL},
        text=[_short(each) for each in pattern.tolist()],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        meta="probability",
    )
    figure.update_layout(_layout(rows["y"], title, highest=float(pattern.max())))
    return figure


def _likeliest(
    score: Float[np.ndarray, " key"], pattern: Float[np.ndarray, " key"], top: int
) -> Integer[np.ndarray, " row"]:
    """The visible keys of the highest probability; of equal ones the earlier first."""
    visible = np.flatnonzero(np.isfinite(score))
    order: Integer[np.ndarray, " row"] = visible[np.argsort(-pattern[visible], kind="stable")][:top]
    return order


def _in_words(
    labels: Sequence[str],
    terms: Mapping[str, Float[np.ndarray, " row"]],
    score: Float[np.ndarray, " row"],
    pattern: Float[np.ndarray, " row"],
) -> list[str]:
    """The whole sum of each row, for the hover box."""
    return [
        "<br>".join(
            [
                f"key {label}",
                *(f"{term_style(name).label} {signed(float(values[row]), '.3f')}" for name, values in terms.items()),
                f"score {signed(float(score[row]), '.3f')}",
                f"probability {_short(float(pattern[row]))}",
            ]
        )
        for row, label in enumerate(labels)
    ]


def _title(label: str, *, visible: int, shown: Float[np.ndarray, " row"]) -> str:
    number, text = label.split(" ", 1)
    together = f"{len(shown)} of its {visible} visible keys, together {float(shown.sum()):.3f}"
    return f"query {number} “{text}”<br>{together}"


def _layout(rows: Sequence[str], title: str, *, highest: float) -> dict[str, object]:
    line_at_0 = {"zeroline": True, "zerolinecolor": NEUTRAL, "zerolinewidth": 1}
    return {
        "template": FIGURE_STYLE,
        "barmode": "relative",
        "bargap": 0.25,
        "height": _PIXELS_OF_A_ROW * len(rows) + 200,
        "title": {
            "text": title,
            "font": {"size": 13},
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 16},
        },
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": "score before softmax"}, "domain": [0, 0.7], **line_at_0},
        # The room on the right, here and in the margin, is for the numbers beside the bars.
        "xaxis2": {
            "title": {"text": "probability<br>after softmax"},
            "domain": [0.76, 1],
            "range": [0, 1.5 * highest],
            "nticks": 3,
            "anchor": "y",
            **line_at_0,
        },
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(rows),
            "range": [len(rows) - 0.5, -0.5],
            "title": {"text": axis_label(KEY), "standoff": 8},
            "showgrid": False,
        },
        "margin": {"t": 110, "r": 34},
    }


def _short(probability: float) -> str:
    """Three digits after the point, for a plotly string; a number that would become 0 says so.

    >>> _short(0.98765), _short(0.0004), _short(0.0)
    ('0.988', '&lt;0.001', '0')
    """
    if 0 < probability < 0.001:
        return "&lt;0.001"
    return f"{probability:.3f}" if probability else "0"


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
                f"`{name}` must have one number for each of the {len(tokens)} tokens; got {values.shape}. "
                "Give the tokens of the text that the numbers come from."
            )
    if not np.isfinite(score).any():
        raise InputError("`score` must be a number at one key at least; it is NaN (hidden) at all of them.")
