"""The sections that show an image, or a recording's spectrogram, under the attention of one row."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from ..draw.chart import OWN_COLOUR, ByChoice, Chart, Slot
from ..draw.figure import Figure
from ..draw.section import Section
from ..draw.style import FIGURE_STYLE, NEUTRAL

SHADE: Final = [[0.0, "rgba(0,0,0,0.8)"], [1.0, "rgba(0,0,0,0)"]]
"""Colours from the least to the most attention; more attention makes the picture below brighter."""
LEVELS: Final = "Greys"
"""The spectrogram's colours: one hue, distinct from that of attention."""
_ATTENTION: Final = "#d55e00"
_BAR: Final = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1.02,
    "yanchor": "bottom",
    "len": 0.5,
    "thickness": 10,
}
_OF_ROW: Final = ("layer", "head", "query")


def picture_section(
    picture: str,
    places: Sequence[tuple[int, int] | None],
    pattern: Float[np.ndarray, "layer head query key"],
    call: str,
) -> Section:
    """Shows the image; the chosen query's attention sets the brightness of each patch.

    Args:
        picture: the image as a data URI.
        places: the row and column of each position's patch; None for a position that is not a patch.
        pattern: the attention of every layer and head.
        call: the Python call that reproduces the numbers.

    """
    held = [place for place in places if place is not None]
    rows, columns = (1 + max(numbers) for numbers in zip(*held, strict=True))
    figure = Figure()
    figure.add_heatmap(
        x=[column + 0.5 for _, column in held],
        y=[row + 0.5 for row, _ in held],
        colorscale=SHADE,
        zmin=0,
        customdata=[f"{row},{column}" for row, column in held],
        text=[f"{row},{column}" for row, column in held],
        hovertemplate="patch %{text}<br>attention %{z:.3g}<extra></extra>",
        colorbar=_BAR | {"title": {"text": "attention after softmax", "side": "top"}},
    )
    frame = {"type": "rect", "name": OWN_COLOUR, "line": {"color": _ATTENTION, "width": 3}}
    figure.update_layout(
        template=FIGURE_STYLE,
        height=min(620, 140 + 460 * rows // columns),
        images=[{"source": picture, "xref": "x", "yref": "y", "x": 0, "y": 0, "sizex": columns, "sizey": rows,
                 "sizing": "stretch", "layer": "below"}],
        xaxis={"range": [0, columns], "showgrid": False, "title": {"text": "patch column"}, "constrain": "domain"},
        yaxis={"range": [rows, 0], "showgrid": False, "title": {"text": "patch row"}, "scaleanchor": "x",
               "constrain": "domain"},
        shapes=[frame | {"x0": 0, "x1": 1, "y0": 0, "y1": 1}],
        margin={"t": 10},
    )  # fmt: skip
    chart = Chart(figure, (_attention("data.0.z", pattern, places), *_frame_slots(places)))
    return Section(
        name="picture",
        tab="look",
        contents="The image",
        heading="The image, brightened by one row of attention",
        reading="Brighter patches receive more attention from the selected query in this head, relative to the "
        "patch that receives the most; black patches receive none. The frame marks the query's own patch.",
        caveat="Positions without a patch, such as [CLS] and registers, are missing from the picture; the maps "
        "below include them.",
        figures={"picture-attention": chart},
        call=call,
    )


def spectrogram_section(
    times: Float[np.ndarray, " time"],
    bands: Float[np.ndarray, " band"],
    levels: Float[np.ndarray, "band time"],
    *,
    units: tuple[str, str],
    frames: Sequence[float | None],
    pattern: Float[np.ndarray, "layer head query key"],
    call: str,
    crosses: bool = False,
) -> Section:
    """Shows the spectrogram of a recording and, above it, the attention that the chosen query gives each moment.

    Args:
        times: the time of each column, in seconds.
        bands: the frequency or band of each row.
        levels: the level of each cell.
        units: the units of bands and levels, such as ("frequency (Hz)", "level (dB)").
        frames: the time at which each position's frame begins, in seconds; None for a position that is not a frame.
        pattern: the attention of every layer and head.
        call: the Python call that reproduces the numbers.
        crosses: whether the queries are tokens of a decoder instead of frames.

    """
    figure = Figure(make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.04, row_heights=[0.35, 0.65]))
    several = len(frames) - len(set(frames)) > 1
    figure.add_scatter(
        x=[frame for frame in frames if frame is not None],
        mode="markers" if several else "lines",
        line={"color": _ATTENTION, "width": 1.5, "shape": "hv"},
        marker={"color": _ATTENTION, "size": 5},
        hovertemplate="key at %{x:.3g} s<br>attention %{y:.3g}<extra></extra>",
        showlegend=False,
        row=1,
        col=1,
    )
    figure.add_heatmap(
        x=times,
        y=bands,
        z=levels,
        colorscale=LEVELS,
        hovertemplate="%{x:.3g} s<br>%{y:.4g}<br>%{z:.3g}<extra></extra>",
        colorbar=_BAR | {"title": {"text": units[1], "side": "top"}},
        row=2,
        col=1,
    )
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": NEUTRAL, "dash": "dot"}}
    figure.update_layout(
        template=FIGURE_STYLE,
        height=430,
        shapes=[] if crosses else [line | {"x0": 0, "x1": 0}],
        margin={"t": 10},
    )
    figure.update_xaxes(title_text="time (s)", row=2, col=1)
    figure.update_yaxes(title_text="attention", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=units[0], showgrid=False, row=2, col=1)
    at = np.array([np.nan if frame is None else frame for frame in frames])
    ends = () if crosses else ("x0", "x1")
    moved = tuple(Slot(f"layout.shapes.0.{end}", ByChoice(at, ("query",))) for end in ends)
    own = "" if crosses else " The dotted line marks the query's own frame."
    query = "decoder token" if crosses else "query"
    chart = Chart(figure, (_attention("data.0.y", pattern, frames), *moved))
    return Section(
        name="spectrogram",
        tab="look",
        contents="The recording",
        heading="The recording, under one row of attention",
        reading=f"Top: attention from the selected {query} to each frame in this head, plotted at the start of the "
        f"frame. Bottom: the spectrogram of the model's input, on the same time axis.{own}",
        caveat="Neighbouring frames overlap, and layers before the first block may mix them (a convolution over "
        "positions), so attention to a frame is not attention to its samples alone.",
        figures={"spectrogram-attention": chart},
        call=call,
    )


def _attention(path: str, pattern: np.ndarray, places: Sequence[object]) -> Slot:
    """The attention of the chosen row to the positions that have a place."""
    there = ByChoice(np.array([int(place is not None) for place in places]))
    return Slot(path, ByChoice(pattern, _OF_ROW, logarithmic=True), where=there, equals=1)


def _frame_slots(places: Sequence[tuple[int, int] | None]) -> tuple[Slot, ...]:
    """The frame around the query's own patch; outside the picture for a query that is not a patch."""
    rows, columns = (np.array([-9 if place is None else place[axis] for place in places]) for axis in (0, 1))
    ends = {"x0": columns, "x1": columns + 1, "y0": rows, "y1": rows + 1}
    return tuple(
        Slot(f"layout.shapes.0.{end}", ByChoice(values.astype(np.float64), ("query",))) for end, values in ends.items()
    )
