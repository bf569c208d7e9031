"""What the heads of one layer write into the residual stream: figures 7 to 10 of formulas.md §1.

The query side shows u = Σ_j p_ij v_j W_O, what a head adds at token i, beside x, the stream that enters the block
at i. The target side shows u = v_j W_O of the key j that token i attends most, without its probability, beside the
stream at j. Both are written once for each token i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int, Integer

from attnmech.draw.figure import Figure
from attnmech.draw.scores import rows_by_mark
from attnmech.draw.style import FIGURE_STYLE, MARKS, NEUTRAL, SCORE_COLOURS, MarkStyle
from attnmech.draw.text import token_labels
from attnmech.draw.view import Side
from attnmech.errors import InputError, index_of

AXIS_TITLES: Final = {
    "query": {
        "magnitude": "update magnitude ‖u‖ / ‖x‖, query side",
        "orientation": "update orientation cos(u, x), query side",
    },
    "target": {
        "magnitude": "update magnitude ‖u‖ / ‖x‖, target side",
        "orientation": "update orientation cos(u, x), target side",
    },
}
"""The axes' words by side and quantity."""

FADED: Final = 0.4
"""The opacity of the heads that are not the chosen one."""

POINT_MARKS: Final = MARKS | {"none": MarkStyle("no choice: one key", NEUTRAL, "x-thin-open", "×")}
"""The marks of figures 9 and 10: where the head attends most at a token."""


@dataclass(frozen=True)
class Bins:
    """A fixed grid of bins, the same for all heads, layers and texts; bin k reaches from k to k + 1 steps."""

    steps_per_unit: int
    logarithmic: bool
    words: str

    def bin_of(self, values: Float[np.ndarray, " token"]) -> Int[np.ndarray, " counted"]:
        """The bin of each value that has one: of NaN none, nor of a magnitude of 0."""
        defined = values[np.isfinite(values)].astype(np.float64)
        if self.logarithmic:
            steps = np.log10(defined[defined > 0])
        else:
            steps = np.clip(defined, -1, 1 - 1e-9)
        places: Int[np.ndarray, " counted"] = np.floor(steps * self.steps_per_unit).astype(np.int64)
        return places

    def edge(self, steps: Float[np.ndarray, " bin"]) -> Float[np.ndarray, " bin"]:
        """The value at so many steps."""
        value: Float[np.ndarray, " bin"] = steps / self.steps_per_unit
        if self.logarithmic:
            value = np.power(10.0, value)
        return value


MAGNITUDE_BINS: Final = Bins(20, logarithmic=True, words="magnitude")
"""Twenty bins a factor of 10."""

ORIENTATION_BINS: Final = Bins(40, logarithmic=False, words="orientation")
"""Eighty bins from -1 to 1; a cosine of exactly 1 counts in the last."""


def magnitude_histograms(
    magnitude: Float[np.ndarray, "head token"], *, side: Side, head: int | None = None
) -> go.Figure:
    """Figure 7: over the tokens, how large the heads' updates are, one histogram a head on a common logarithmic axis.

    Args:
        magnitude: ‖u‖ / ‖x‖ of one layer; what is NaN or 0 is left out.
        side: "query" or "target", for the axis.
        head: a head to stand out from the others.

    Returns:
        One trace a head (the trace's `meta`), standing at the head's height; each is scaled to its own fullest bin.

    """
    return _histograms(magnitude, MAGNITUDE_BINS, head).update_layout(
        xaxis=_magnitude_axis(side), meta={"magnitude": "xaxis"}
    )


def orientation_histograms(
    orientation: Float[np.ndarray, "head token"], *, side: Side, head: int | None = None
) -> go.Figure:
    """Figure 8: over the tokens, which way the heads' updates point, one histogram a head from -1 to 1.

    Args:
        orientation: cos(u, x) of one layer; NaN is left out.
        side: as in `magnitude_histograms`.
        head: as in `magnitude_histograms`.

    Returns:
        As `magnitude_histograms`.

    """
    return _histograms(orientation, ORIENTATION_BINS, head).update_layout(
        xaxis=_orientation_axis(side), meta={"orientation": "xaxis"}
    )


def orientation_by_magnitude(
    magnitude: Float[np.ndarray, "head token"],
    orientation: Float[np.ndarray, "head token"],
    attended: Integer[np.ndarray, "head token"],
    tokens: Sequence[str],
    *,
    side: Side,
    head: int | None = None,
) -> go.Figure:
    """Figure 9: which way an update points against how large it is, a point for each head and token of one layer.

    Args:
        magnitude: ‖u‖ / ‖x‖; points that are NaN or 0 are left out.
        orientation: cos(u, x); NaN where undefined.
        attended: the key that each token attends most; -1 where it has no choice.
        tokens: the text's tokens.
        side: as in `magnitude_histograms`.
        head: a head to stand out from the others.

    Returns:
        A trace for each mark, "all self" and so on (the traces' `meta`); with `head`, the marks of the "others" and
        then those of the "chosen" head; last, the "legend". Each point's `customdata` begins with its head.

    """
    figure = _points(_positive(magnitude), orientation, attended, tokens, head)
    figure.update_traces(hovertemplate="%{customdata[1]}<br>magnitude %{x:.3g}<br>orientation %{y:+.3f}<extra></extra>")
    return figure.update_layout(
        height=480,
        xaxis=_magnitude_axis(side),
        yaxis=_orientation_axis(side),
        meta={"magnitude": "xaxis", "orientation": "yaxis"},
    )


def magnitude_by_position(
    magnitude: Float[np.ndarray, "head token"],
    attended: Integer[np.ndarray, "head token"],
    tokens: Sequence[str],
    *,
    side: Side,
    head: int | None = None,
) -> go.Figure:
    """Figure 10: how large the updates are along the text, all heads of a layer together, marked by where they attend.

    Args:
        magnitude: as in `orientation_by_magnitude`.
        attended: as in `orientation_by_magnitude`.
        tokens: the text's tokens.
        side: as in `magnitude_histograms`.
        head: as in `orientation_by_magnitude`.

    Returns:
        As `orientation_by_magnitude`.

    """
    positions = np.broadcast_to(np.arange(magnitude.shape[1], dtype=np.float64), magnitude.shape)
    figure = _points(positions, _positive(magnitude), attended, tokens, head)
    figure.update_traces(hovertemplate="%{customdata[1]}<br>magnitude %{y:.3g}<extra></extra>")
    return figure.update_layout(
        height=440,
        xaxis={"title": {"text": "position of the query token"}, "range": [-1, len(tokens)]},
        yaxis=_magnitude_axis(side),
        meta={"magnitude": "yaxis"},
    )


def _histograms(values: Float[np.ndarray, "head token"], bins: Bins, chosen: int | None) -> go.Figure:
    """One histogram a head, each standing on its own line: overlaid, the curves of 24 heads would hide each other."""
    heads = len(values)
    _require_head(chosen, heads)
    figure = Figure()
    for head in range(heads):
        edges, count = _filled_bins(bins.bin_of(values[head]))
        low, high = bins.edge(edges), bins.edge(edges + 1)
        figure.add_scatter(
            x=bins.edge(edges + 0.5),
            y=head - 0.9 * count / max(count.max(initial=0), 1),
            customdata=np.stack([count, low, high], axis=1).tolist(),
            mode="lines",
            line={"shape": "hvh", "color": SCORE_COLOURS[3], "width": 1.5},
            fill="toself",
            fillcolor=SCORE_COLOURS[2],
            opacity=1 if chosen in (None, head) else FADED,
            hovertemplate=f"head {head}: %{{customdata[0]}} tokens<br>"
            f"{bins.words} %{{customdata[1]:.3g}} to %{{customdata[2]:.3g}}<extra></extra>",
            showlegend=False,
            meta=head,
        )
    figure.update_layout(
        template=FIGURE_STYLE,
        height=int(np.clip(30 * heads, 200, 760)) + 70,
        hovermode="closest",
        yaxis={"title": {"text": "head"}, "tickvals": list(range(heads)), "range": [heads - 0.7, -1.1]},
    )
    return figure


def _filled_bins(
    bin_of_token: Int[np.ndarray, " counted"],
) -> tuple[Float[np.ndarray, " bin"], Int[np.ndarray, " bin"]]:
    """The bins from the first to the last that hold a token, with an empty one at either end; and their counts."""
    if not bin_of_token.size:
        return np.empty(0), np.empty(0, dtype=np.int64)
    first = bin_of_token.min() - 1
    count = np.bincount(bin_of_token - first, minlength=bin_of_token.max() - first + 2)
    return np.arange(first, first + len(count), dtype=np.float64), count


def _points(
    x: Float[np.ndarray, "head token"],
    y: Float[np.ndarray, "head token"],
    attended: Integer[np.ndarray, "head token"],
    tokens: Sequence[str],
    chosen: int | None,
) -> go.Figure:
    """A point for each head and token, by the mark of the key attended; those of the chosen head larger and on top."""
    heads, length = x.shape
    _require_head(chosen, heads)
    if length != len(tokens):
        raise InputError(
            f"`tokens` must be the {length} tokens of the text that the numbers come from; got {len(tokens)}."
        )
    words = _point_words(attended, token_labels(tokens))
    mark = _mark_of(attended)
    drawn = np.isfinite(x) & np.isfinite(y)
    figure = Figure()
    for group, heads_in_group in _groups(heads, chosen).items():
        for name, style in POINT_MARKS.items():
            head, token = np.nonzero(drawn & (mark == name) & heads_in_group[:, None])
            figure.add_scatter(
                x=x[head, token],
                y=y[head, token],
                customdata=[[int(h), words[h][t]] for h, t in zip(head, token, strict=True)],
                mode="markers",
                marker={
                    "color": style.colour,
                    "symbol": style.symbol,
                    "size": 9 if group == "chosen" else 5,
                    "line": {"color": "white" if group == "chosen" else style.colour, "width": 1},
                },
                opacity=FADED if group == "others" else 1,
                legendgroup=name,
                showlegend=False,
                meta=f"{group} {name}",
            )
    for name, style in POINT_MARKS.items():
        figure.add_scatter(
            x=[None],  # a trace without a single entry has no place in the legend
            y=[None],
            mode="markers",
            marker={"color": style.colour, "symbol": style.symbol, "size": 9},
            name=style.label,
            legendgroup=name,
            showlegend=True,
            meta=f"legend {name}",
        )
    emphasis = "" if chosen is None else "large: the chosen head; small: the layer's other heads<br>"
    figure.update_layout(
        template=FIGURE_STYLE,
        hovermode="closest",
        legend={"title": {"text": f"{emphasis}the key attended most is"}},
    )
    return figure


def _groups(heads: int, chosen: int | None) -> dict[str, Bool[np.ndarray, " head"]]:
    if chosen is None:
        return {"all": np.ones(heads, dtype=np.bool_)}
    is_chosen = np.arange(heads) == chosen
    return {"others": ~is_chosen, "chosen": is_chosen}


def _mark_of(attended: Integer[np.ndarray, "head token"]) -> np.ndarray:
    """The name of the mark at each head and token."""
    marks = np.full(attended.shape, "none", dtype=object)
    for head, keys in enumerate(attended):
        for name, rows in rows_by_mark(keys).items():
            marks[head, rows] = name
    return marks


def _point_words(attended: Integer[np.ndarray, "head token"], labels: list[str]) -> list[list[str]]:
    """What a hover box says of each head and token."""
    return [
        [
            f"head {head}, query {labels[token]}<br>" + (f"attends most to {labels[key]}" if key >= 0 else "one key")
            for token, key in enumerate(keys)
        ]
        for head, keys in enumerate(attended)
    ]


def _positive(magnitude: Float[np.ndarray, "head token"]) -> Float[np.ndarray, "head token"]:
    """Without magnitudes of 0, which have no place on a logarithmic axis."""
    return np.where(magnitude > 0, magnitude, np.nan)


def _magnitude_axis(side: Side) -> dict[str, object]:
    return {"title": {"text": AXIS_TITLES[side]["magnitude"]}, "type": "log", "dtick": "D2", "exponentformat": "power"}


def _orientation_axis(side: Side) -> dict[str, object]:
    return {"title": {"text": AXIS_TITLES[side]["orientation"]}, "range": [-1.03, 1.03], "zeroline": True}


def _require_head(head: int | None, heads: int) -> None:
    if head is not None:
        index_of("head", head, heads, f"this layer has {heads} heads")
