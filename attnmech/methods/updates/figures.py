"""What the heads of one layer write into the residual stream: figures 7 to 10 of "Attention Focus Plots".

The query side compares u = Σ_j p_ij v_j W_O, what a head adds at token i, with x, the stream that enters the block
at i. The target side compares u = v_j W_O, where j is the key to which token i attends most and the probability is left
out, with the stream at j. Both sides have one value for each token i.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float, Int, Integer

from ...basics.arguments import index_of
from ...basics.nouns import TEXT, Nouns
from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.numbers import Side
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS, MarkStyle, marks_for, marks_of
from ...draw.text import token_labels
from ...errors import InputError

AXIS_TITLES: Final = {
    side: {
        "magnitude": f"update magnitude ‖u‖ / ‖x‖, {side} side",
        "orientation": f"update orientation cos(u, x), {side} side",
    }
    for side in ("query", "target")
}

FADED: Final = 0.4  # the opacity of the heads that are not selected
NO_CHOICE: Final = MarkStyle("one visible key", NEUTRAL, "x-thin-open", "×")  # the mark in figures 9 and 10


@dataclass(frozen=True)
class Bins:
    """A fixed grid of bins, shared by all heads, layers and texts; bin k reaches from k to k + 1 steps."""

    steps_per_unit: int
    logarithmic: bool
    words: str

    def bin_of(self, values: Float[np.ndarray, " token"]) -> Int[np.ndarray, " counted"]:
        """Returns the bins of the values; NaN and magnitudes of 0 have no bin and are left out."""
        defined = values[np.isfinite(values)].astype(np.float64)
        if self.logarithmic:
            steps = np.log10(defined[defined > 0])
        else:
            steps = np.clip(defined, -1, 1 - 1e-9)
        places: Int[np.ndarray, " counted"] = np.floor(steps * self.steps_per_unit).astype(np.int64)
        return places

    def edge(self, steps: Float[np.ndarray, "*head bin"]) -> Float[np.ndarray, "*head bin"]:
        """Returns the value at a number of steps."""
        value: Float[np.ndarray, "*head bin"] = steps / self.steps_per_unit
        return np.power(10.0, value) if self.logarithmic else value


MAGNITUDE_BINS: Final = Bins(20, logarithmic=True, words="magnitude")  # twenty bins per factor of 10
ORIENTATION_BINS: Final = Bins(40, logarithmic=False, words="orientation")  # from -1 to 1; a cosine of 1 is in the last


def orientation_by_magnitude_chart(
    magnitude: Float[np.ndarray, "side layer head token"],
    orientation: Float[np.ndarray, "side layer head token"],
    sides: Sequence[Side],
    *,
    attended: Integer[np.ndarray, "layer head token"],
    tokens: Sequence[str],
    chosen: bool = True,
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws figure 9: the direction of updates against their size, one point for each head and token of a layer."""
    figure, slots = _points(
        _coordinates(magnitude, logarithmic=True), _coordinates(orientation), attended, tokens, chosen, nouns
    )
    hover = f"{_POINT_HOVER}<br>magnitude %{{x:.3g}}<br>orientation %{{y}}<extra></extra>"
    figure.update_traces(hovertemplate=hover).update_layout(
        height=480, xaxis=_axis("magnitude", sides), yaxis=_axis("orientation", sides)
    )
    words = _titles({"magnitude": "xaxis", "orientation": "yaxis"}, sides)
    return Chart(figure, (*slots, *words, *_range_of(magnitude, "xaxis", sides)), clicks={"head": "customdata.0"})


def magnitude_by_position_chart(
    magnitude: Float[np.ndarray, "side layer head token"],
    sides: Sequence[Side],
    *,
    attended: Integer[np.ndarray, "layer head token"],
    tokens: Sequence[str],
    chosen: bool = True,
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws figure 10: the size of updates along the text, for all heads of a layer, by where the heads attend."""
    position = np.broadcast_to(np.arange(magnitude.shape[-1], dtype=np.float64), magnitude.shape)
    figure, slots = _points(
        _coordinates(position), _coordinates(magnitude, logarithmic=True), attended, tokens, chosen, nouns
    )
    hover = f"{_POINT_HOVER}<br>magnitude %{{y:.3g}}<extra></extra>"
    figure.update_traces(hovertemplate=hover).update_layout(
        height=440,
        xaxis={"title": {"text": f"position of the {nouns.query_token}"}, "range": [-1, len(tokens)]},
        yaxis=_axis("magnitude", sides),
    )
    words = _titles({"magnitude": "yaxis"}, sides)
    return Chart(figure, (*slots, *words, *_range_of(magnitude, "yaxis", sides)), clicks={"head": "customdata.0"})


_OF_LAYER: Final = ("side", "layer")
_OF_HEAD: Final = ("side", "layer", "head")


def of_one_layer(
    chart: Callable[..., Chart],
    *values: Float[np.ndarray, "head token"],
    side: Side,
    head: int | None = None,
    attended: Integer[np.ndarray, "head token"] | None = None,
    **options: Any,
) -> go.Figure:
    """The chart of one layer and side, with its own range; `head` is highlighted.

    `attended` is the key to which each token attends most; -1 for a token that sees only one key. The `meta` of a trace
    is its head or its mark; a highlighted head lies on top.
    """
    heads = len(values[0])
    if head is not None:
        index_of("head", head, heads, f"this layer has {heads} heads")
    keys = {} if attended is None else {"attended": attended[None]}
    drawn = chart(*(array[None, None] for array in values), (side,), chosen=head is not None, **keys, **options)
    return drawn.figure(side=0, layer=0, head=head or 0)


def _coordinates(
    values: Float[np.ndarray, "side layer head token"], *, logarithmic: bool = False
) -> Callable[[tuple[str, ...]], ByChoice]:
    shown = np.where(values > 0, values, np.nan) if logarithmic else values  # a logarithmic axis cannot show 0
    blocks = math.prod(values.shape[:3])
    return lambda over: ByChoice(_flat(shown, over), over, logarithmic=logarithmic, blocks=blocks)


def _flat(values: np.ndarray, over: tuple[str, ...]) -> np.ndarray:
    """Reshapes the values to one axis per choice and one for everything else."""
    return values.reshape(*values.shape[: len(over)], -1)


def _histograms(
    bins: Bins,
    values: Float[np.ndarray, "side layer head token"],
    sides: Sequence[Side],
    *,
    chosen: bool = True,
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws one histogram per head, on separate lines: overlaid, the curves of 24 heads would hide each other."""
    heads = values.shape[2]
    x, y, low, high, count = _outlines(values, bins)
    columns = tuple(ByChoice(array, _OF_HEAD, logarithmic=bins.logarithmic) for array in (x, low, high))
    places, counts = ByChoice(y, _OF_HEAD), ByChoice(count, _OF_HEAD)
    figure, slots = Figure(), []
    for head in range(heads):
        middle, lower, upper, place, number = (
            replace(choice, fixed={"head": head}) for choice in (*columns, places, counts)
        )
        at = f"data.{head}"
        slots += [
            Slot(f"{at}.x", middle, where=number),
            Slot(f"{at}.y", place, where=number),
            Slot(f"{at}.customdata", (number, lower, upper), where=number),
        ]
        if chosen:
            opacity = np.where(np.arange(heads) == head, 1.0, FADED)
            slots.append(Slot(f"{at}.opacity", ByChoice(opacity, ("head",))))
        figure.add_scatter(
            mode="lines",
            line={"shape": "hvh", "color": SCORE_COLOURS[3], "width": 1.5},
            fill="toself",
            fillcolor=SCORE_COLOURS[2],
            opacity=1,
            hovertemplate=f"head {head}: %{{customdata[0]}} {nouns.tokens}<br>"
            f"{bins.words} %{{customdata[1]:.3g}} to %{{customdata[2]:.3g}}<extra></extra>",
            showlegend=False,
            meta=head,
        )
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": int(np.clip(30 * heads, 200, 760)) + 70,
        "hovermode": "closest",
        "xaxis": _axis(bins.words, sides),
        "yaxis": {"title": {"text": "head"}, "tickvals": list(range(heads)), "range": [heads - 0.7, -1.1]},
    }
    ends = _range_of(values, "xaxis", sides) if bins.logarithmic else ()
    return Chart(figure, (*slots, *_titles({bins.words: "xaxis"}, sides), *ends), clicks={"head": "data.meta"})


magnitude_histograms_chart: Final = partial(_histograms, MAGNITUDE_BINS)
"""Draws figure 7: the size of updates over the tokens, one histogram per head on a common logarithmic axis."""

orientation_histograms_chart: Final = partial(_histograms, ORIENTATION_BINS)
"""Draws figure 8: the direction of updates over the tokens, one histogram per head from -1 to 1."""


def _outlines(values: Float[np.ndarray, "side layer head token"], bins: Bins) -> tuple[np.ndarray, ...]:
    """For each histogram and bin: middle, height in the figure, lower and upper edge, count (-1 beyond the last)."""
    filled = [_filled_bins(bins.bin_of(tokens)) for tokens in values.reshape(-1, values.shape[-1])]
    most = max(len(count) for _, count in filled)
    edges = np.full((len(filled), most), np.nan)
    counts = np.full((len(filled), most), -1)
    for row, (edge, count) in enumerate(filled):
        edges[row, : len(edge)], counts[row, : len(count)] = edge, count
    edges, counts = (array.reshape(*values.shape[:3], most) for array in (edges, counts))
    fullest = counts.max(axis=-1, keepdims=True, initial=1)
    height = np.arange(values.shape[2])[:, None] - 0.9 * counts / fullest
    return bins.edge(edges + 0.5), np.where(counts < 0, np.nan, height), bins.edge(edges), bins.edge(edges + 1), counts


def _filled_bins(
    bin_of_token: Int[np.ndarray, " counted"],
) -> tuple[Float[np.ndarray, " bin"], Int[np.ndarray, " bin"]]:
    """The bins from the first to the last that contains a token, with one empty bin at either end, and their counts."""
    if not bin_of_token.size:
        return np.empty(0), np.empty(0, dtype=np.int64)
    first = bin_of_token.min() - 1
    count = np.bincount(bin_of_token - first, minlength=bin_of_token.max() - first + 2)
    return np.arange(first, first + len(count), dtype=np.float64), count


_POINT_HOVER: Final = "head %{customdata[0]}, query %{customdata[1]}<br>%{customdata[2]}"


def _points(
    x: Callable[[tuple[str, ...]], ByChoice],
    y: Callable[[tuple[str, ...]], ByChoice],
    attended: Integer[np.ndarray, "layer head token"],
    tokens: Sequence[str],
    chosen: bool,
    nouns: Nouns,
) -> tuple[go.Figure, list[Slot]]:
    """Draws a point for each head and token, marked by the attended key; those of the selected head are on top."""
    heads, length = attended.shape[1:]
    if length != len(tokens):
        raise InputError(
            f"`tokens` must be the {length} tokens of the text that the numbers come from; got {len(tokens)}."
        )
    labels, styles = token_labels(tokens), marks_for(nouns) | {"none": NO_CHOICE}
    drawn = np.isfinite(x(_OF_HEAD).values) & np.isfinite(y(_OF_HEAD).values)
    codes = np.where(drawn, np.where(attended < 0, len(styles) - 1, marks_of(attended)), -1)
    head, query = (
        np.broadcast_to(array, (heads, length)).copy() for array in (np.arange(heads)[:, None], range(length))
    )
    key = np.where(attended < 0, length, attended)
    keys = (*(f"highest attention to {label}" for label in labels), "one key")
    figure, slots = Figure(), []
    for group, over in ({"all": _OF_LAYER, "chosen": _OF_HEAD} if chosen else {"all": _OF_LAYER}).items():
        only = over[2:]
        hover = (
            ByChoice(_flat(head, only), only),
            ByChoice(_flat(query, only), only, words=tuple(labels)),
            ByChoice(_flat(key, over[1:]), over[1:], words=keys),
        )
        for code, (name, style) in enumerate(styles.items()):
            at = f"data.{len(figure.data)}"
            here: dict[str, Any] = {"where": ByChoice(_flat(codes, over), over), "equals": code}
            slots += [
                Slot(f"{at}.x", x(over), **here),
                Slot(f"{at}.y", y(over), **here),
                Slot(f"{at}.customdata", hover, **here),
            ]
            figure.add_scatter(
                mode="markers",
                marker={
                    "color": style.colour,
                    "symbol": style.symbol,
                    **({"size": 9, "line": {"color": "white", "width": 1}} if group == "chosen" else {"size": 6}),
                },
                opacity=FADED if chosen and group == "all" else 1,
                legendgroup=name,
                showlegend=False,
                meta=f"{group} {name}",
            )
    for name, style in styles.items():
        figure.add_scatter(
            x=[None],  # a trace without data would be missing from the legend
            y=[None],
            mode="markers",
            marker={"color": style.colour, "symbol": style.symbol, "size": 9},
            name=style.label,
            legendgroup=name,
            showlegend=True,
            meta=f"legend {name}",
        )
    emphasis = "large: the selected head; small: all heads of the layer<br>" if chosen else ""
    figure.layout = {
        "template": FIGURE_STYLE,
        "hovermode": "closest",
        "legend": {"title": {"text": f"{emphasis}highest attention to"}},
    }
    return figure, slots


def _titles(axes: Mapping[str, str], sides: Sequence[Side]) -> list[Slot]:
    return [
        Slot(
            f"layout.{axis}.title.text",
            ByChoice(np.array([AXIS_TITLES[side][quantity] for side in sides], dtype=object), ("side",)),
        )
        for quantity, axis in axes.items()
    ]


def _range_of(
    magnitude: Float[np.ndarray, "side layer head token"], axis: str, sides: Sequence[Side]
) -> tuple[Slot, ...]:
    """The log10 ends of a range that the axes of all layers share, so that layers can be compared."""
    if len(sides) == 1:
        return ()
    ends = []
    for values in magnitude:
        positive = values[values > 0]
        logarithms = np.log10(positive) if positive.size else np.array([-0.9, -0.1])
        ends.append([logarithms.min() - 0.1, logarithms.max() + 0.1])
    return (Slot(f"layout.{axis}.range", ByChoice(np.array(ends), ("side",))),)


def _axis(quantity: str, sides: Sequence[Side]) -> dict[str, object]:
    title = {"title": {"text": AXIS_TITLES[sides[0]][quantity]}}
    if quantity == "magnitude":
        return title | {"type": "log", "dtick": "D2", "exponentformat": "power"}
    return title | {"range": [-1.03, 1.03], "zeroline": True, "hoverformat": "+.3f"}
