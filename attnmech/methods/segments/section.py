"""The section of a page about how a token's sentence attends to the other sentences."""

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from ...draw.carried import error_of
from ...draw.chart import ByChoice, Chart, Slot, row_frame
from ...draw.figure import Figure
from ...draw.head_maps import SIGNED_COLOURS
from ...draw.section import Section
from ...draw.segments import segment_labels
from ...draw.style import FIGURE_STYLE, SCORE_COLOURS
from ...draw.text import bound, isolated, percent, visible_token

_BEGINNING: Final = 60  # the largest number of a segment's characters that a finding quotes


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
    """Shows how the segments attend to each other in the selected head, with the selected token's segment framed.

    Args:
        mass: the share of a row's attention that goes to each segment, mean over the rows of a segment.
        expected: the same shares for attention by distance alone.
        segments: the texts of the segments.
        starts: the first token of each segment, followed by the number of tokens.
        tokens: the text's tokens.
        layers: the layers of both arrays, from which the reader selects one on the page.
        call: the Python expression for the result.

    """
    of_token = np.repeat(np.arange(len(segments)), np.diff(starts))
    reach = np.abs(mass - expected).max(axis=(2, 3))
    charts = {
        "segment-mass": _segment_chart(mass, segments, of_token, "share of attention", None),
        "segment-excess": _segment_chart(mass - expected, segments, of_token, "share minus distance baseline", reach),
    }

    texts = [f"“{_in_a_line(text)}”" for text in segments]

    def told(layer: int, head: int, query: int) -> str:
        return of_segment(layer, head, int(of_token[query]))

    @cache
    def of_segment(layer: int, head: int, own: int) -> str:
        row, alone = mass[layer, head, own], expected[layer, head, own]
        others = [at for at in np.argsort(-row, kind="stable").tolist() if at != own and row[at] > 0][:2]
        parts = [
            f"{percent(float(row[at]))} to sentence {at} (distance baseline {percent(float(alone[at]))})"
            for at in others
        ]
        shares = ", ".join([f"{percent(float(row[own]))} of their attention to each other", *parts])
        return f"In L{layers[layer]}H{head}, tokens of sentence {own}, {texts[own]}, give {shares}."

    return Section(
        name="token-segments",
        tab="token",
        contents="A token's sentence",
        heading="Attention between a token's sentence and the others",
        finding=ByChoice.texts(("layer", "head", "query"), (*mass.shape[:2], len(tokens)), told),
        reading="Left: the share of attention from the tokens of each sentence (down) to the tokens of each sentence "
        "(across), averaged over rows. Right: that share minus the share expected from the head's mean "
        "attention at each distance. The frame marks the sentence of the selected token; a cell names both when "
        "the pointer is on it.",
        caveat="Later sentences see more of the text, and a sentence's share of attention to itself grows with its "
        "length; the right map subtracts both effects.",
        figures=charts,
        call=f'{call}.plot("mass", layer={{layer}}, head={{head}})',
        rounding=f"shares of sentences are off by at most {bound(max(error_of(chart) for chart in charts.values()))}",
    )


def _in_a_line(text: str) -> str:
    line = " ".join(visible_token(word) for word in text.split())
    return isolated(line if len(line) <= _BEGINNING else f"{line[: _BEGINNING - 1]}…")


def _segment_chart(
    values: Float[np.ndarray, "layer head query_segment key_segment"],
    segments: Sequence[str],
    of_token: Int[np.ndarray, " token"],
    label: str,
    reach: Float[np.ndarray, "layer head"] | None,
) -> Chart:
    """Draws a map for the selected head; with `reach`, values are signed and the colour scale ends at ±reach."""
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
    side = {"text": "query sentence", "standoff": 12}  # numbers here too: two maps share the page's width
    figure.update_yaxes(title=side, range=[count - 0.5, -0.5], showgrid=False, **ticks)
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
