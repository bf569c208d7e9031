"""A map of the scores of one head on one text (docs/formulas.md#attention-scores)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float, Int

from ..basics.arguments import option, strings
from ..basics.nouns import TEXT, Nouns
from ..basics.public import public
from ..errors import InputError
from .chart import ByChoice, Chart, Slot, height_of_rows, of_heads, row_frame, token_axis
from .figure import Figure
from .patterns import VALUE_WEIGHTED, as_array, require_length
from .style import BAR_ABOVE, FIGURE_STYLE, SCORE_COLOURS, marks_for, marks_of
from .text import labels_of

MOST_TOKENS_WITH_GAPS: Final = 64
"""The largest number of tokens at which a map has gaps between its cells; with more, it would be mostly gaps."""

MEASURES: Final = {
    "score": "score before softmax",
    "relative": "score minus the highest of its row",
    "probability": "probability after softmax",
}
"""The measures that the cells of figure 1 can show."""

VALUE: Final = "value"  # a further measure, on a page that has the norms of what keys write

PALEST_RELATIVE: Final = -8.0
"""A score this far below its row's highest has e⁻⁸ = 0.03 % of its weight; lower scores have the palest colour."""

_RANGES: Final[dict[str, dict[str, float]]] = {
    "score": {},
    "relative": {"zmin": PALEST_RELATIVE, "zmax": 0},
    "probability": {"zmin": 0, "zmax": 1},
    "value": {"zmin": 0, "zmax": 1},
}


@public
def attention_map(
    scores: Float[np.ndarray, "query key"],
    tokens: Sequence[str],
    *,
    outlined: int | None = None,
    measure: str = "score",
    pattern: Float[np.ndarray, "query key"] | None = None,
    keys: Sequence[str] | None = None,
) -> go.Figure:
    """Draws figure 1: the scores before softmax, one row per query, with the highest score of each row marked.

    >>> figure = attention_map(np.array([[0.5, np.nan], [0.1, 0.7]]), ["What", " does"])
    >>> [list(trace.x) for trace in figure.data[1:]]
    [['1 ·does'], [], []]

    Args:
        scores: score before softmax; hidden cells are NaN and stay blank.
        tokens: the text's tokens, which are both the queries and the keys.
        outlined: a query whose row gets a frame.
        measure: "score", or "relative" for each score minus the highest of its row, or "probability".
        pattern: probability after softmax, needed for the measure "probability".
        keys: the key tokens in cross-attention; the query tokens by default.

    Returns:
        A heat map and one trace of marks for each of "self", "first" and "other" (the traces' `meta`); in
        cross-attention "first", "last" and "other". A row with fewer than two visible keys has no choice and gets no
        mark.

    """
    strings("tokens", tokens)
    option("measure", measure, MEASURES)
    if measure == "probability" and pattern is None:
        raise InputError('measure="probability" needs `pattern`; got None.')
    measured = {"scores": scores} if pattern is None else {"scores": scores, "pattern": pattern}
    arrays = {name: as_array(array, np.float64) for name, array in measured.items()}
    for name, array in arrays.items():
        if array.ndim != 2:
            raise InputError(f"`{name}` must have the axes [query key]; got the shape {array.shape}.")
        for length, labels in zip(array.shape, (tokens, tokens if keys is None else keys), strict=True):
            require_length(length, labels, name)
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
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws figure 1 for every head. With several measures, the reader chooses a "measure"; `norms` add one more."""
    labels, key_labels = labels_of(tokens, keys, nouns)
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
    for code, (mark, style) in enumerate(marks_for(nouns, crosses=keys is not None).items()):
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
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": height_of_rows(len(tokens)) + 245,
        "legend": {"title": {"text": "highest score of a row (unmarked if only one key is visible)"}},
        "xaxis": token_axis(key_labels, nouns.key_token) | {"showgrid": False, "tickangle": -90},
        "yaxis": token_axis(labels, nouns.query_token, downwards=True) | {"showgrid": False},
        "margin": {"t": 125},
        "shapes": [frame] if framed else [],
    }
    return Chart(figure, (*slots, *(follow if framed else ())), clicks={"query": "y"})


def _heat_map(measure: str, labels: list[str], keys: list[str], *, shown: bool) -> go.Heatmap:
    gap = 1 if max(len(labels), len(keys)) <= MOST_TOKENS_WITH_GAPS else 0
    words = {"score": "score", "relative": "below the highest", "probability": "probability", VALUE: "share"}[measure]
    paler = f" (palest at {PALEST_RELATIVE:g} and below)".replace("-", "−") if measure == "relative" else ""
    return go.Heatmap(
        x=keys,
        y=labels,
        xgap=gap,
        ygap=gap,
        visible=shown,
        colorscale=SCORE_COLOURS,
        colorbar=BAR_ABOVE
        | {"yref": "container", "y": 0.995, "yanchor": "top"}
        | {"title": {"text": (MEASURES | {VALUE: VALUE_WEIGHTED.weight})[measure] + paler, "side": "bottom"}},
        zhoverformat=".3f",
        hovertemplate=f"query %{{y}}<br>key %{{x}}<br>{words} %{{z}}<extra></extra>",
        meta="scores" if measure == "score" else measure,
        **_RANGES[measure],
    )


def highest_key(scores: Float[np.ndarray, "*head query key"]) -> Int[np.ndarray, "*head query"]:
    """Returns the key of the highest score in each row; -1 where fewer than two keys are visible."""
    visible = np.isfinite(scores)
    return np.where(visible.sum(axis=-1) > 1, np.where(visible, scores, -np.inf).argmax(axis=-1), -1)
