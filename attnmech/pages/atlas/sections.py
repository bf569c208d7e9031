"""The sections of the atlas: example rows, a head's numbers among all heads', and its attention by distance."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from ...draw.chart import CHOSEN_COLOUR, ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.heads import HeadNumber
from ...draw.section import Section, Tab
from ...draw.style import FIGURE_STYLE, NEUTRAL
from ...methods.examples.figures import READING
from ...methods.examples.result import HeadExamples
from ...methods.focus.attention_focus import AttentionFocus
from ..heads import LOOKS, MATTERS, WHY, WRITES

_OF_HEAD: Final = ("layer", "head")

GROUPS: Final[Mapping[Tab, str]] = {"look": LOOKS, "why": WHY, "write": WRITES, "matter": MATTERS}
"""The numbers that each tab shows."""


def about_examples(examples: HeadExamples, files: Sequence[str]) -> Section:
    """The rows of the chosen head; with `files`, they lie beside the page."""
    return Section(
        tab="look",
        contents="Example rows",
        heading="Example rows",
        reading=READING,
        caveat="The strongest rows are extremes. The rows at random, and those of each fifth, show the others.",
        figures={"examples": examples.view(files=files, embedded=True)},
        call="atlas.examples.examples_of({layer}, {head})",
    )


def about_numbers(numbers: Sequence[HeadNumber], tab: Tab) -> list[Section]:
    """The chosen head's numbers of one question, among those of all heads."""
    varying = [number for number in numbers if number.group == GROUPS[tab] and np.nanstd(number.values) > 0]
    return [_about_numbers(varying, tab)] if varying else []


def _about_numbers(numbers: Sequence[HeadNumber], tab: Tab) -> Section:
    return Section(
        tab=tab,
        contents="This head among all heads",
        heading="This head among all heads",
        reading="Each line is one number, from its lowest to its highest value over all heads. The bar spans the "
        "middle half of the heads, the tick is the median head, and the diamond is the selected head, with its "
        "value and 95 % interval over texts.",
        figures={f"numbers-{tab}": among_heads(numbers)},
        call="atlas.to_frame()",
    )


def among_heads(numbers: Sequence[HeadNumber]) -> Chart:
    """Each number of the chosen head on a line from the lowest to the highest value of all heads."""
    labels = [number.label for number in numbers]
    values = np.stack([number.values for number in numbers], axis=-1)
    low, high = (end(values, axis=(0, 1)) for end in (np.nanmin, np.nanmax))
    places = (values - low) / (high - low)
    lower, median, upper = np.nanquantile(places, (0.25, 0.5, 0.75), axis=(0, 1))
    figure = Figure()
    figure.add_bar(
        y=labels, x=upper - lower, base=lower, orientation="h", marker={"color": "rgba(128, 140, 152, 0.35)"},
        width=0.5, hoverinfo="skip", name="middle half of the heads",
    )  # fmt: skip
    figure.add_scatter(
        y=labels, x=median, mode="markers", hoverinfo="skip", name="median head",
        marker={"symbol": "line-ns-open", "size": 12, "color": NEUTRAL, "line": {"width": 2}},
    )  # fmt: skip
    figure.add_scatter(
        y=labels, mode="markers+text", textposition="top center", textfont={"size": 11}, cliponaxis=False,
        marker={"symbol": "diamond", "size": 10, "color": CHOSEN_COLOUR}, name="selected head",
        error_x={"type": "data", "symmetric": False, "thickness": 1.5, "width": 3},
        hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    spans = [f"{_short(one, 2)} to {_short(other, 2)}" for one, other in zip(low, high, strict=True)]
    figure.update_layout(
        template=FIGURE_STYLE,
        height=80 + 34 * len(numbers),
        margin={"l": 10, "r": 120, "t": 20, "b": 40},
        showlegend=False,
        annotations=[
            {
                "x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": label, "text": end, "showarrow": False,
                "font": {"size": 11, "color": NEUTRAL},
            }
            for label, end in zip(labels, spans, strict=True)
        ],
    )  # fmt: skip
    figure.update_xaxes(
        range=[-0.02, 1.02], tickvals=[0, 1], ticktext=["lowest head", "highest head"], showgrid=False, zeroline=False
    )
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=True)
    written = np.empty(values.shape, dtype=object)
    for place in np.ndindex(values.shape):
        written[place] = _short(values[place]) if np.isfinite(values[place]) else ""
    slots = [Slot("data.2.x", ByChoice(places, _OF_HEAD)), Slot("data.2.text", ByChoice(written, _OF_HEAD))]
    for name, sign, end in (("arrayminus", -1, 0), ("array", 1, 1)):
        ends = np.stack([number.values if number.ends is None else number.ends[end] for number in numbers], axis=-1)
        reach = np.clip(np.nan_to_num(sign * (ends - values) / (high - low)), 0, None)
        slots.append(Slot(f"data.2.error_x.{name}", ByChoice(reach, _OF_HEAD)))
    return Chart(figure, tuple(slots))


def about_kernel(focus: AttentionFocus, layers: Sequence[int]) -> list[Section]:
    """The share of the chosen head's attention at each distance."""
    shares = focus.distance_histogram[list(layers)].double().numpy()
    if not np.isfinite(shares).any():
        return []
    return [
        Section(
            tab="look",
            contents="Attention by distance",
            heading="Attention by distance",
            finding=ByChoice.texts(_OF_HEAD, shares.shape[:2], lambda layer, head: _nearest(shares[layer, head])),
            reading="The share of the head's attention that goes to keys at each distance from the query, over all "
            "rows of the corpus. The grey line is the mean over all heads.",
            figures={"by-distance": by_distance(shares)},
            call="atlas.focus.distance_histogram[{layer}, {head}]",
        )
    ]


def by_distance(shares: Float[np.ndarray, "layer head distance"]) -> Chart:
    """Draws the share of attention at each distance, on a logarithmic axis of distances."""
    distances = np.arange(shares.shape[-1]) + 1
    figure = Figure()
    figure.add_scatter(
        x=distances, y=np.nanmean(shares, axis=(0, 1)).tolist(), mode="lines", line={"color": NEUTRAL, "dash": "dot"},
        name="mean over heads", hovertemplate="mean over heads: %{y:.1%}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=distances, mode="lines", line={"color": CHOSEN_COLOUR, "width": 2.5}, name="selected head",
        customdata=distances - 1, hovertemplate="distance %{customdata}: %{y:.1%}<extra></extra>",
    )  # fmt: skip
    ticks = [tick for tick in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if tick < len(distances)]
    figure.update_layout(template=FIGURE_STYLE, height=300, legend={"orientation": "h", "y": 1, "yanchor": "bottom"})
    figure.update_xaxes(
        type="log",
        title="distance, tokens (0: the token itself)",
        tickvals=[tick + 1 for tick in ticks],
        ticktext=ticks,
    )
    figure.update_yaxes(title="share of attention", tickformat=".0%", rangemode="tozero")
    return Chart(figure, (Slot("data.1.y", ByChoice(shares, _OF_HEAD)),))


def _nearest(shares: Float[np.ndarray, " distance"]) -> str:
    """Where half of the attention lies, in a sentence."""
    if not np.isfinite(shares).all():
        return ""
    half = int(np.searchsorted(np.cumsum(shares), 0.5))
    where = "the token itself" if half == 0 else f"keys at most {half} token{'s' * (half > 1)} away"
    return f"Half of its attention goes to {where}."


def _short(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}g}".replace("-", "−")
