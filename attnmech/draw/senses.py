"""The sections that show an image, or a recording's spectrogram, under the attention of one row."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from .chart import OWN_COLOUR, ByChoice, Chart, Slot
from .figure import Figure
from .section import Section
from .style import BAR_ABOVE, FIGURE_STYLE, NEUTRAL

SHADE: Final = [[0.0, "rgba(0,0,0,0.8)"], [1.0, "rgba(0,0,0,0)"]]
"""Colours from the least to the most attention; more attention makes the picture below brighter."""
_UNSEEN: Final = [[0.0, "rgba(0,0,0,0)"], [1.0, "rgba(150,150,150,0.9)"]]  # covers the patches that a row does not see
LEVELS: Final = "Greys"  # the spectrogram's colours: one hue, distinct from that of attention
_ATTENTION: Final = "#d55e00"
_BAR: Final = BAR_ABOVE | {"y": 1.02, "yanchor": "bottom"}
MIXED: Final = "A patch's token also holds what the vision tower has mixed into it from other patches."
_OF_ROW: Final = ("layer", "head", "query")


@dataclass(frozen=True)
class Canvas:
    """A picture, and the part of it that each position holds."""

    picture: str  # a data URI
    size: tuple[float, float]  # its width and height, in the unit of the boxes
    boxes: Sequence[tuple[float, float, float, float] | None]
    """Left, top, right and bottom of each position's part; None for a position without one here."""
    title: str = ""

    @property
    def ends(self) -> Float[np.ndarray, "position 4"]:
        """The boxes; outside the picture for positions without one."""
        return np.array([(-9.0, -9.0, -8.0, -8.0) if box is None else box for box in self.boxes])


def picture_uri(image: Any) -> str:
    """A Pillow image as a data URI, no larger than a page shows it."""
    small, file = image.copy(), BytesIO()
    small.thumbnail((640, 640))
    small.save(file, "PNG")
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def picture_section(
    canvases: Sequence[Canvas],
    labels: Sequence[str],
    pattern: Float[np.ndarray, "layer head query key"],
    call: str,
    *,
    queries: Sequence[int] = (),
    among: bool = False,
) -> Section:
    """Shows pictures, or parts that the model reads apart; the chosen query's attention sets each patch's brightness.

    `labels` names each position, `queries` are those whose rows `pattern` holds, by default the last, and `among` says
    whether the patches are among the tokens of a text.
    """
    columns = min(3, len(canvases))
    rows = -(-len(canvases) // columns)
    figure = Figure(make_subplots(rows=rows, cols=columns, subplot_titles=[canvas.title for canvas in canvases]))
    hidden = (pattern == 0).all(axis=(0, 1))
    own = list(queries or range(len(labels))[-pattern.shape[2] :])
    slots: list[Slot] = []
    tallest = 0.0
    for number, canvas in enumerate(canvases):
        here = [place for place, box in enumerate(canvas.boxes) if box is not None]
        left, top, right, bottom = canvas.ends[here].T
        axis = str(number + 1) if number else ""
        cells = {
            "x": ((left + right) / 2).tolist(),
            "y": ((top + bottom) / 2).tolist(),
            "xaxis": f"x{axis}",
            "yaxis": f"y{axis}",
        }
        names = [labels[place] for place in here]
        figure.add_heatmap(
            **cells, coloraxis="coloraxis", text=names, customdata=names,
            hovertemplate="patch %{text}<br>attention %{z:.3g}<extra></extra>",
        )  # fmt: skip
        figure.add_heatmap(**cells, colorscale=_UNSEEN, zmin=0, zmax=1, showscale=False, hoverinfo="skip")
        width, height = canvas.size
        figure.add_layout_image(
            source=canvas.picture, xref=f"x{axis}", yref=f"y{axis}", x=0, y=0, sizex=width, sizey=height,
            sizing="stretch", layer="below",
        )  # fmt: skip
        figure.add_shape(
            type="rect", name=OWN_COLOUR, line={"color": _ATTENTION, "width": 3}, xref=f"x{axis}", yref=f"y{axis}",
            x0=0, x1=1, y0=0, y1=1,
        )  # fmt: skip
        view = {
            "showgrid": False,
            "constrain": "domain",
            "zeroline": False,
            "showticklabels": not among,
            "ticks": "" if among else None,
        }
        figure.layout[f"xaxis{axis}"].update(view | {"range": [float(left.min()), float(right.max())]})
        figure.layout[f"yaxis{axis}"].update(
            view | {"range": [float(bottom.max()), float(top.min())], "scaleanchor": f"x{axis}"}
        )
        if not among:
            figure.layout[f"xaxis{axis}"].title = {"text": "patch column"}
            figure.layout[f"yaxis{axis}"].title = {"text": "patch row"}
        tallest = max(tallest, float((bottom.max() - top.min()) / (right.max() - left.min())))
        slots.append(_attention(f"data.{2 * number}.z", pattern, canvas.boxes))
        there = ByChoice(np.array([int(box is not None) for box in canvas.boxes]))
        covered = ByChoice(hidden.astype(np.int64), ("query",))
        slots.append(Slot(f"data.{2 * number + 1}.z", covered, where=there, equals=1))
        ends = dict(zip(("x0", "y0", "x1", "y1"), canvas.ends[own].T, strict=True))
        slots += [Slot(f"layout.shapes.{number}.{end}", ByChoice(at, ("query",))) for end, at in ends.items()]
    height = min(900, int(140 + rows * 460 * tallest / columns))
    above = 30 if among else 6  # the titles of pictures
    bar = _BAR | {"title": {"text": "attention after softmax", "side": "top"}, "y": 1 + above / height}
    figure.update_layout(
        template=FIGURE_STYLE,
        height=height,
        coloraxis={"colorscale": SHADE, "cmin": 0, "colorbar": bar},
        margin={"t": 40 if among else 10},
    )
    framed = any(canvas.boxes[place] is not None for canvas in canvases for place in own)
    frame = " The frame marks the query's own patch." if framed else ""
    covers = (
        " Grey patches get none from this query in any head shown, such as those after it."
        if among and hidden.any()
        else ""
    )
    return Section(
        name="picture",
        tab="look",
        contents="The pictures" if among else "The image",
        heading=f"The {'pictures' if among else 'image'}, brightened by one row of attention",
        reading="Brighter patches receive more attention from the selected query in this head, relative to the "
        f"patch that receives the most; black patches receive none.{frame}{covers}",
        caveat="Positions without a patch, such as [CLS] and registers, are missing from the picture; the maps "
        "below include them."
        if not among
        else f"{MIXED} Attention to the text is in the maps below.",
        figures={"picture-attention": Chart(figure, tuple(slots))},
        call=call,
    )


@dataclass(frozen=True)
class Spectrogram:
    """Levels by frequency and time."""

    times: Float[np.ndarray, " time"]  # the time of the middle of each column, in seconds
    bands: Float[np.ndarray, " band"]
    levels: Float[np.ndarray, "band time"]
    units: tuple[str, str]  # the units of the bands and of the levels


def spectrogram_section(
    spectrogram: Spectrogram,
    *,
    frames: Sequence[float | None],
    pattern: Float[np.ndarray, "layer head query key"],
    call: str,
    crosses: bool = False,
) -> Section:
    """Shows the spectrogram of a recording and, above it, the attention that the chosen query gives each moment.

    `frames` are the times at which the positions' frames begin, in seconds, None where a position is no frame;
    `crosses` says whether the queries are tokens of a decoder instead.
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
        x=spectrogram.times,
        y=spectrogram.bands,
        z=spectrogram.levels,
        colorscale=LEVELS,
        hovertemplate="%{x:.3g} s<br>%{y:.4g}<br>%{z:.3g}<extra></extra>",
        colorbar=_BAR | {"title": {"text": spectrogram.units[1], "side": "top"}},
        row=2,
        col=1,
    )
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": NEUTRAL, "dash": "dot"}}
    figure.update_layout(
        template=FIGURE_STYLE, height=430, shapes=[] if crosses else [line | {"x0": 0, "x1": 0}], margin={"t": 10}
    )
    figure.update_xaxes(title_text="time (s)", row=2, col=1)
    figure.update_yaxes(title_text="attention", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=spectrogram.units[0], showgrid=False, row=2, col=1)
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
    there = ByChoice(np.array([int(place is not None) for place in places]))
    return Slot(path, ByChoice(pattern, _OF_ROW, logarithmic=True), where=there, equals=1)
