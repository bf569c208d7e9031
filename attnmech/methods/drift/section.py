"""The sections of a page about drift: how to read the figures, and how one token changes from layer to layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from ...draw.carried import error_of
from ...draw.chart import CHOSEN_COLOUR, ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, NEUTRAL
from ...draw.text import bound, plotly_text, quoted, shorten, visible_token

NAMED: Final = 4  # the largest number of nearest rows that a table lists


PLACE_WORDS: Final = {"resid_mid": "attention + residual", "resid_post": "the output of each block"}


def labels_of(vocabulary: int, k: int) -> dict[str, str]:
    """What each figure of lines over layers shows, for a number of rows and of nearest rows."""
    return {
        "cosine": "cosine to the token's own embedding",
        "rank": f"1 + rank of the token's own row (of {vocabulary:,})",
        "churn": f"share of new rows among the {k} nearest",
    }


def reading_of(figure: str, at: str, k: int, texts: int) -> str:
    """Says how to read a figure of lines over layers; for one text, each line is a token."""
    of = "token" if texts == 1 else "word type, with 95 % intervals over texts"
    if figure == "cosine":
        return (
            f"One line per {of}: the cosine between the stream ({PLACE_WORDS[at]}) and the token's own row of the "
            "embedding. Grey: the mean cosine between two tokens of a text, and between a token and any row."
        )
    if figure == "rank":
        mean = "" if texts == 1 else " Geometric means of 1 + rank."
        return (
            f"1 + the number of rows more similar to the stream than the token's own row, on a logarithmic axis.{mean}"
        )
    return f"The share of the {k} nearest rows that were not among the {k} nearest in the layer below."


@dataclass(frozen=True)
class DriftNumbers:
    """The numbers that a page shows for each token, layer by layer."""

    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    vocabulary: int  # the number of rows
    k: int  # the number of nearest rows that churn compares
    cosine: Float[np.ndarray, "token layer"]
    rank: Float[np.ndarray, "token layer"]
    churn: Float[np.ndarray, "token layer"]  # NaN in the first layer
    means: Mapping[str, Float[np.ndarray, " layer"]]
    """Means over the text's ordinary tokens: "cosine", "rank" (geometric mean of 1 + rank, minus 1) and "churn"."""
    between_tokens: Float[np.ndarray, " layer"]  # the mean cosine of two ordinary tokens
    to_any_row: Float[np.ndarray, " layer"]  # the mean cosine of a token and any row
    nearest: Int[np.ndarray, "token layer place"]  # the nearest rows, as indices into `names`
    names: tuple[str, ...]


def drift_section(view: DriftNumbers, call: str, layers: Sequence[int]) -> Section:
    """Shows how far the chosen token moves from its own embedding.

    Args:
        view: the numbers.
        call: the Python expression for the result.
        layers: the layers that the reader can choose; a line marks the current one.

    """
    labels = labels_of(view.vocabulary, view.k)
    charts = {f"token-{name}": _lines(view, layers, name, label) for name, label in labels.items()}
    charts["token-nearest"] = nearest_chart(view)
    rounded = max(error_of(charts[f"token-{name}"]) for name in ("cosine", "churn"))
    return Section(
        name="token-drift",
        tab="token",
        contents="Drift of one token",
        heading="Drift of one token",
        finding=_about_drift(view),
        reading="For the selected token, after attention in each layer: the cosine between its stream and its own row "
        "of the embedding; the number of rows more similar to the stream than its own row; the share of the nearest "
        "rows that are new in this layer; and the nearest rows, with its own row in bold. Orange: this token. Grey: "
        "baselines, namely the mean of the text's ordinary tokens and, for the cosine, the means for two tokens of the "
        "text and for a token and any row. The vertical line marks the selected layer; click a point to select "
        "another.",
        caveat="Residual streams of one layer point in similar directions, so compare each cosine with its baselines.",
        figures=charts,
        call=f'{call}.plot("cosine", query={{query}})',
        rounding=f"cosines and churn of tokens are off by at most {bound(rounded)}" if rounded else "",
    )


def _lines(view: DriftNumbers, layers: Sequence[int], name: str, label: str) -> Chart:
    logarithmic = name == "rank"  # of 1 + rank, so that 0 can be drawn
    values, mean = (numbers + logarithmic for numbers in (getattr(view, name), view.means[name]))
    baselines = {"mean of the text's tokens": mean}
    if name == "cosine":
        baselines |= {"two tokens of the text": view.between_tokens, "a token and any row": view.to_any_row}
    figure = Figure()
    figure.add_scatter(
        x=list(view.layers),
        mode="lines+markers",
        name="this token",
        line={"color": CHOSEN_COLOUR, "width": 2.5},
        marker={"size": 8},
        hovertemplate=f"layer %{{x}}<br>{label}: %{{y:.4g}}<extra></extra>",
        showlegend=True,
    )
    for dash, (words, mean) in zip(("solid", "dot", "longdash"), baselines.items(), strict=False):
        figure.add_scatter(
            x=list(view.layers), y=mean, mode="lines", name=words, line={"color": NEUTRAL, "dash": dash, "width": 2},
            hovertemplate=f"layer %{{x}}<br>{words}: %{{y:.4g}}<extra></extra>", showlegend=True,
        )  # fmt: skip
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": NEUTRAL, "width": 1, "dash": "dot"}}
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": 360,
        "shapes": [line],
        "legend": {"orientation": "h", "yref": "container", "y": 0.995, "yanchor": "top", "x": 0, "xanchor": "left"},
        "margin": {"t": 90, "r": 10},
        "xaxis": {"title": {"text": "layer"}, "dtick": max(1, len(view.layers) // 12)},
        "yaxis": {"title": {"text": label}},
    }
    if logarithmic:
        figure.update_yaxes(type="log", dtick=1, exponentformat="none", separatethousands=True)
    chosen = ByChoice(np.array(layers, dtype=np.float64), ("layer",))
    slots = (
        Slot("data.0.y", ByChoice(values, ("query",), logarithmic=logarithmic)),
        Slot("layout.shapes.0.x0", chosen),
        Slot("layout.shapes.0.x1", chosen),
    )
    return Chart(figure, slots, clicks={"layer": "x"})


def nearest_chart(view: DriftNumbers) -> Chart:
    """Draws a table of the rows nearest to the chosen token, layer by layer; its own row is bold."""
    plain = [plotly_text(shorten(visible_token(name))) for name in view.names]
    words = (*plain, *(f"<b>{name}</b>" for name in plain))
    own = np.array([[name == token for name in view.names] for token in view.tokens])
    named = view.nearest + len(plain) * np.take_along_axis(own[:, None], view.nearest, axis=2)
    places = min(NAMED, view.nearest.shape[2])
    clear = "rgba(0,0,0,0)"
    figure = Figure()
    figure.add_table(
        header={
            "values": ["layer", "rank of<br>its own", *(f"nearest {place + 1}" for place in range(places))],
            "fill": {"color": clear}, "line": {"color": NEUTRAL}, "align": "left",
        },
        cells={
            "values": [list(view.layers), *([] for _ in range(places + 1))],
            "fill": {"color": clear}, "line": {"color": NEUTRAL}, "align": "left", "height": 26,
        },
        columnwidth=[1.2, 1.5, *[2] * places],
    )  # fmt: skip
    figure.layout = {
        "template": FIGURE_STYLE,
        "height": min(110 + 26 * len(view.layers), 360),
        "margin": dict.fromkeys("lrtb", 8),
    }
    # As text, because numbers on a page are rounded and a rank is a whole number.
    ranks, which = np.unique(view.rank, return_inverse=True)
    in_words = tuple("" if np.isnan(rank) else f"{int(rank):,}" for rank in ranks)
    slots = [Slot("data.0.cells.values.1", ByChoice(which.reshape(view.rank.shape), ("query",), words=in_words))]
    slots += [
        Slot(f"data.0.cells.values.{place + 2}", ByChoice(named[:, :, place], ("query",), words=words))
        for place in range(places)
    ]
    return Chart(figure, tuple(slots))


def _about_drift(view: DriftNumbers) -> ByChoice:
    def told(query: int) -> str:
        known = np.flatnonzero(np.isfinite(view.cosine[query]) & np.isfinite(view.rank[query]))
        name = f"Token {query} {quoted(view.tokens[query])}"
        if not known.size:
            return f"{name} has a stream of norm 0."
        first, last = known[[0, -1]].tolist()
        cosines, pairs = (
            [float(values[at]) for at in (first, last)] for values in (view.cosine[query], view.between_tokens)
        )
        ranks = [int(view.rank[query, at]) for at in (first, last)]
        beside = f" (two tokens of the text: {pairs[0]:.2f} and {pairs[1]:.2f})" if np.isfinite(pairs).all() else ""
        return (
            f"{name} has cosine {cosines[0]:.2f} with its own embedding in layer {view.layers[first]} and "
            f"{cosines[1]:.2f} in layer {view.layers[last]}{beside}; {ranks[0]:,} and {ranks[1]:,} of "
            f"{view.vocabulary:,} rows are more similar to its stream."
        )

    return ByChoice.texts(("query",), (len(view.tokens),), told)
