"""What a page says about the chosen token: how it drifts, where its stream gets its parts, how its segment attends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]

from .carried import error_of
from .chart import ByChoice, Chart, Slot, row_frame
from .effects import SIGNED_COLOURS
from .figure import Figure
from .section import Section
from .segments import segment_labels
from .style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from .text import bound, isolated, percent, plotly_text, quoted, shorten, token_labels, visible_token

NAMED: Final = 4
"""How many of the nearest rows a table names."""

_INFLOWS: Final = 4
"""How many of a token's largest inflows a sentence names."""

_BEGINNING: Final = 60
"""Characters of a segment in a sentence."""

_COLOUR: Final = "#d55e00"

_STEPS: Final = np.linspace(0, 1, 11)
_ROOT_COLOURS: Final = [
    [float(step**2), colour]
    for step, colour in zip(_STEPS, sample_colorscale(SCORE_COLOURS, _STEPS.tolist()), strict=True)
]
"""Colours by the square root of a share, so that small ones stay visible."""


@dataclass(frozen=True)
class DriftNumbers:
    """What a page shows of each token's way through the layers."""

    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    vocabulary: int
    """The number of rows."""
    k: int
    """How many nearest rows churn compares."""
    cosine: Float[np.ndarray, "token layer"]
    rank: Float[np.ndarray, "token layer"]
    churn: Float[np.ndarray, "token layer"]
    """NaN in the first layer."""
    means: Mapping[str, Float[np.ndarray, " layer"]]
    """Of the text's ordinary tokens: "cosine", "rank" (geometric mean of 1 + rank, minus 1) and "churn"."""
    between_tokens: Float[np.ndarray, " layer"]
    """The mean cosine of two ordinary tokens."""
    to_any_row: Float[np.ndarray, " layer"]
    """The mean cosine of a token and any row."""
    nearest: Int[np.ndarray, "token layer place"]
    """The nearest rows, as indices into `names`."""
    names: tuple[str, ...]


def drift_section(view: DriftNumbers, call: str, layers: Sequence[int]) -> Section:
    """How far the chosen token moves from its own embedding.

    Args:
        view: the numbers.
        call: the Python that gives the result.
        layers: those that can be chosen on the page, which a line marks.

    """
    charts = {
        "token-cosine": _lines(view, layers, "cosine", "cosine to the own embedding", view.cosine),
        "token-rank": _lines(view, layers, "rank", f"1 + rows more similar (of {view.vocabulary:,})", 1 + view.rank),
        "token-churn": _lines(view, layers, "churn", f"share of the {view.k} nearest that is new", view.churn),
        "token-nearest": nearest_chart(view),
    }
    rounded = max(error_of(charts[f"token-{name}"]) for name in ("cosine", "churn"))
    return Section(
        name="token-drift",
        contents="What becomes of a token",
        heading="What becomes of a token",
        finding=_about_drift(view),
        reading="For the chosen token, after attention in each layer: the cosine of its stream and its own row of the "
        "embedding; how many rows are more similar to the stream than its own; the share of the nearest rows that the "
        "layer below did not have; and the nearest rows, with its own in bold. Orange: this token; grey: baselines, "
        "which are the mean of the text's ordinary tokens and, for the cosine, that of two tokens of the text and of a "
        "token and any row. The upright line is the chosen layer: click a point to choose another.",
        caveat="Streams of one layer point in much the same direction, so a cosine says little beside its baselines.",
        figures=charts,
        call=f'{call}.plot("cosine", token={{query}})',
        rounding=f"cosines and churn of tokens are off by at most {bound(rounded)}" if rounded else "",
    )


def _lines(
    view: DriftNumbers, layers: Sequence[int], name: str, label: str, values: Float[np.ndarray, "token layer"]
) -> Chart:
    """One number of the chosen token over the layers, beside its baselines."""
    logarithmic = name == "rank"
    baselines = {"mean of the text's tokens": view.means[name] + (1 if logarithmic else 0)}
    if name == "cosine":
        baselines |= {"two tokens of the text": view.between_tokens, "a token and any row": view.to_any_row}
    figure = Figure()
    figure.add_scatter(
        x=list(view.layers),
        mode="lines+markers",
        name="this token",
        line={"color": _COLOUR, "width": 2.5},
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
    figure.update_layout(
        template=FIGURE_STYLE,
        height=360,
        shapes=[line],
        legend={"orientation": "h", "yref": "container", "y": 0.995, "yanchor": "top", "x": 0, "xanchor": "left"},
        margin={"t": 90, "r": 10},
        xaxis={"title": {"text": "layer"}, "dtick": max(1, len(view.layers) // 12)},
        yaxis={"title": {"text": label}},
    )
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
    """A table of the rows nearest to the chosen token, layer by layer; its own is bold."""
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
    figure.update_layout(
        template=FIGURE_STYLE, height=min(110 + 26 * len(view.layers), 360), margin=dict.fromkeys("lrtb", 8)
    )
    # In words, since numbers on a page are rounded: a rank is a whole number.
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
            return f"{name}: its stream is 0."
        first, last = known[[0, -1]].tolist()
        cosines, pairs = (
            [float(each[at]) for at in (first, last)] for each in (view.cosine[query], view.between_tokens)
        )
        ranks = [int(view.rank[query, at]) for at in (first, last)]
        beside = f" (two tokens of the text: {pairs[0]:.2f} and {pairs[1]:.2f})" if np.isfinite(pairs).all() else ""
        return (
            f"{name}: its cosine to its own embedding goes from {cosines[0]:.2f} in layer {view.layers[first]} to "
            f"{cosines[1]:.2f} in layer {view.layers[last]}{beside}; of {view.vocabulary:,} rows, {ranks[0]:,} and "
            f"{ranks[1]:,} are more similar to its stream."
        )

    return ByChoice.texts(("query",), (len(view.tokens),), told)


def flow_section(
    shares: Float[np.ndarray, "layer query key"],
    tokens: Sequence[str],
    *,
    layers_of_flow: Sequence[int],
    layers: Sequence[int],
    call: str,
) -> Section:
    """From which tokens the chosen one gets its parts, layer by layer.

    Args:
        shares: of each key in its row of ‖Σ_h p f(x) + δ x‖; rows sum to 1.
        tokens: the text's tokens.
        layers_of_flow: the layers of `shares`.
        layers: those that can be chosen on the page, one of which has a frame.
        call: the Python that gives the result.

    """
    chart = _flow_chart(shares, tokens, layers_of_flow, layers)
    return Section(
        name="token-flow",
        contents="Where a token's parts come from",
        heading="Where a token's parts come from",
        finding=_about_flow(shares, tokens, layers_of_flow),
        reading="The stream of the chosen token after attention, layer by layer, as a sum of what all heads together "
        "bring from each token and, from itself, the stream that it had before: the share of each in the sum of their "
        "norms (Kobayashi et al. 2021). The square is the largest share from another token. Click a cell to follow "
        "that token; the frame is the chosen layer.",
        caveat="A share is of norms, not of meaning: parts may cancel, and MLPs are not in it. Shades follow the "
        "square root, so that small shares stay visible.",
        figures={"token-inflow": chart},
        call=f"{call}.sources({{query}})",
        rounding=f"shares of inflow are off by at most {bound(error_of(chart))}",
    )


def _flow_chart(
    shares: Float[np.ndarray, "layer query key"],
    tokens: Sequence[str],
    own_layers: Sequence[int],
    layers: Sequence[int],
) -> Chart:
    labels, names = token_labels(tokens), [str(layer) for layer in own_layers]
    by_query = np.where(shares > 0, shares, np.nan).transpose(1, 0, 2)
    most, _ = strongest(shares)
    figure = Figure()
    figure.add_heatmap(
        x=labels,
        y=names,
        zmin=0,
        zmax=1,
        colorscale=_ROOT_COLOURS,
        colorbar={"title": {"text": "share", "side": "right"}, "thickness": 12, "tickvals": [0.02, 0.1, 0.25, 0.5, 1],
                  "tickformat": ".0%"},
        hovertemplate="layer %{y}<br>from %{x}<br>%{z:.1%}<extra></extra>",
        hoverongaps=False,
        xgap=1 if len(labels) <= 64 else 0,
        ygap=1,
    )  # fmt: skip
    figure.add_scatter(
        y=names, mode="markers", hoverinfo="skip", showlegend=False, name="largest from another token",
        marker={"color": _COLOUR, "symbol": "square", "size": 8, "line": {"color": "white", "width": 1}},
    )  # fmt: skip
    frame, _ = row_frame(len(names))
    rows = np.array([own_layers.index(layer) for layer in layers], dtype=np.float64)
    axis: dict[str, Any] = {"type": "category", "categoryorder": "array"}
    figure.update_layout(
        template=FIGURE_STYLE,
        height=int(np.clip(170 + 22 * len(names), 250, 800)),
        shapes=[frame],
        xaxis=axis | {"categoryarray": labels, "range": [-0.5, len(labels) - 0.5], "title": {"text": "from token"},
                      "tickangle": -90, "showgrid": False, "tickfont": {"size": 11}},
        yaxis=axis | {"categoryarray": names, "range": [-0.5, len(names) - 0.5], "title": {"text": "layer"},
                      "showgrid": False},
        margin={"t": 20},
    )  # fmt: skip
    slots = (
        Slot("data.0.z", ByChoice(by_query, ("query",))),
        Slot("data.1.x", ByChoice(most.T, ("query",), words=tuple(labels))),
        Slot("layout.shapes.0.y0", ByChoice(rows - 0.5, ("layer",))),
        Slot("layout.shapes.0.y1", ByChoice(rows + 0.5, ("layer",))),
    )
    return Chart(figure, slots, clicks={"query": "x"})


def strongest(
    shares: Float[np.ndarray, "layer query key"],
) -> tuple[Int[np.ndarray, "layer query"], Float[np.ndarray, "layer query"]]:
    """The other token from which each gets most, -1 where there is none, and its share."""
    others = shares.copy()
    every = np.arange(shares.shape[1])
    others[:, every, every] = 0
    share = others.max(axis=-1)
    return np.where(share > 0, others.argmax(axis=-1), -1), share


def _about_flow(shares: Float[np.ndarray, "layer query key"], tokens: Sequence[str], layers: Sequence[int]) -> ByChoice:
    most, share = strongest(shares)

    def told(query: int) -> str:
        own = shares[:, query, query]
        low, high = (percent(float(each), 0) for each in (own.min(), own.max()))
        itself = f"{low} of its parts come" if low == high else f"{low} to {high} of its parts come"
        order = [at for at in np.argsort(-share[:, query], kind="stable").tolist() if most[at, query] >= 0][:_INFLOWS]
        parts = [
            f"{percent(float(share[at, query]))} from {most[at, query]} {quoted(tokens[most[at, query]])} in layer "
            f"{layers[at]}"
            for at in order
        ]
        found = f"most from others: {', '.join(parts)}" if parts else "nothing from other tokens"
        return f"Token {query} {quoted(tokens[query])}: in each layer {itself} from itself; {found}."

    return ByChoice.texts(("query",), (len(tokens),), told)


def segment_section(
    mass: Float[np.ndarray, "layer head query_segment key_segment"],
    expected: Float[np.ndarray, "layer head query_segment key_segment"],
    segments: Sequence[str],
    starts: Sequence[int],
    *,
    tokens: Sequence[str],
    layers: Sequence[int],
    call: str,
) -> Section:
    """How the segments attend to each other in the chosen head, with the chosen token's segment framed.

    Args:
        mass: the share of a row's attention that goes to each segment, mean over the rows of a segment.
        expected: what distance alone would give.
        segments: their texts.
        starts: where each begins, then the number of tokens.
        tokens: the text's tokens.
        layers: the layers of both arrays, which can be chosen on the page.
        call: the Python that gives the result.

    """
    of_token = np.repeat(np.arange(len(segments)), np.diff(starts))
    reach = np.abs(mass - expected).max(axis=(2, 3))
    charts = {
        "segment-mass": _segment_chart(mass, segments, of_token, "share of attention", None),
        "segment-excess": _segment_chart(mass - expected, segments, of_token, "share above distance", reach),
    }

    texts = [f"“{_in_a_line(text)}”" for text in segments]

    def told(layer: int, head: int, query: int) -> str:
        return of_segment(layer, head, int(of_token[query]))

    @cache
    def of_segment(layer: int, head: int, own: int) -> str:
        row, alone = mass[layer, head, own], expected[layer, head, own]
        others = [at for at in np.argsort(-row, kind="stable").tolist() if at != own and row[at] > 0][:2]
        parts = [
            f"{percent(float(row[at]))} to sentence {at} ({percent(float(alone[at]))} by distance alone)"
            for at in others
        ]
        given = ", ".join([f"{percent(float(row[own]))} of their attention to each other", *parts])
        return f"In L{layers[layer]}H{head}, the tokens of sentence {own}, {texts[own]}, give {given}."

    return Section(
        name="token-segments",
        contents="A token's sentence",
        heading="A token's sentence and the others",
        finding=ByChoice.texts(("layer", "head", "query"), (*mass.shape[:2], len(tokens)), told),
        reading="Left: how much the tokens of each sentence (down) attend to those of each other (across), mean over "
        "their rows. Right: the same minus what the head's attention by distance alone would give. The frame is the "
        "sentence of the chosen token.",
        caveat="Later sentences see more of the text, and a sentence's own share grows with its length: compare with "
        "the right map, where both are taken off.",
        figures=charts,
        call=f'{call}.plot("mass", layer={{layer}}, head={{head}})',
        rounding=f"shares of sentences are off by at most {bound(max(error_of(each) for each in charts.values()))}",
    )


def _in_a_line(text: str) -> str:
    """How a segment begins, as plain text."""
    line = " ".join(visible_token(word) for word in text.split())
    return isolated(line if len(line) <= _BEGINNING else f"{line[: _BEGINNING - 1]}…")


def _segment_chart(
    values: Float[np.ndarray, "layer head query_segment key_segment"],
    segments: Sequence[str],
    of_token: Int[np.ndarray, " token"],
    label: str,
    reach: Float[np.ndarray, "layer head"] | None,
) -> Chart:
    """One map of the chosen head; with `reach`, its values have signs and go that far."""
    labels, count = segment_labels(segments), len(segments)
    drawn = ByChoice(values, ("layer", "head"))
    figure = Figure()
    figure.add_heatmap(
        x=list(range(count)),
        y=list(range(count)),
        zmin=0,
        zmax=1,
        customdata=[[f"{query} → {key}" for key in labels] for query in labels],
        colorscale=SCORE_COLOURS if reach is None else SIGNED_COLOURS,
        colorbar={"title": {"text": label, "side": "right"}, "thickness": 12},
        hovertemplate=f"%{{customdata}}<br>%{{z:{'.1%' if reach is None else '+.1%'}}}<extra></extra>",
        xgap=1 if count <= 40 else 0,
        ygap=1 if count <= 40 else 0,
    )
    frame, _ = row_frame(count)
    ticks = {"tickvals": list(range(count))} if count <= 40 else {}
    figure.update_layout(template=FIGURE_STYLE, height=max(280, 130 + min(24 * count, 700)), shapes=[frame])
    figure.update_xaxes(title="key sentence", showgrid=False, tickangle=0, **ticks)
    names = {"ticktext": labels} if ticks else {}
    figure.update_yaxes(
        title={"text": "query sentence", "standoff": 12}, range=[count - 0.5, -0.5], showgrid=False, **ticks, **names
    )
    slots = [
        Slot("data.0.z", drawn),
        Slot("layout.shapes.0.y0", ByChoice(of_token - 0.5, ("query",))),
        Slot("layout.shapes.0.y1", ByChoice(of_token + 0.5, ("query",))),
    ]
    if reach is not None:
        ends = reach.clip(1e-6)
        slots += [
            Slot("data.0.zmin", ByChoice(-ends, ("layer", "head"))),
            Slot("data.0.zmax", ByChoice(ends, ("layer", "head"))),
        ]
    return Chart(figure, tuple(slots))
