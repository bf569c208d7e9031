"""The sections of a page about what a layer's heads write: figures 7 to 10, on the query side or the target side."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from ...basics.nouns import Nouns
from ...draw.carried import carried_error
from ...draw.chart import ByChoice
from ...draw.numbers import Side, UpdateNumbers
from ...draw.section import Choice, Section
from ...draw.style import marks_for, marks_of
from ...draw.text import bound, quoted, signed
from .figures import (
    magnitude_by_position_chart,
    magnitude_histograms_chart,
    orientation_by_magnitude_chart,
    orientation_histograms_chart,
)

SIDES: Final[tuple[Side, ...]] = ("query", "target")
SUFFIXES: Final = ("", "_of_target")  # how the name of a figure ends, for each side

SIDE: Final = Choice(
    "side", "Update", SIDES, tuple(f"{side} side" for side in SIDES), in_calls=SUFFIXES, everywhere=True
)


_OF_HEAD: Final = ("side", "layer", "head")


def update_sections(view: UpdateNumbers, call: str) -> list[Section]:
    """Figures 7 to 10 of every layer; `call` is the Python expression for the result."""
    nouns = view.nouns
    sides = {
        "query": f"On the query side, u = Σ p v W_O over the keys is the head's output at the {nouns.query_token}, "
        "and x is the residual stream that enters the block there.",
        "target": "On the target side, u = v W_O of the key that the query attends to most, without its "
        "probability, and x is the residual stream that enters the block at that key; a key counts once per query "
        "that attends to it most.",
    }
    magnitude, orientation = view.magnitude, view.orientation
    positive = np.where(magnitude > 0, magnitude, np.nan)
    off = carried_error(ByChoice(positive, _OF_HEAD, logarithmic=True))
    points: dict[str, Any] = {"attended": view.attended, "tokens": view.tokens, "nouns": nouns}
    by_magnitude = orientation_by_magnitude_chart(magnitude, orientation, SIDES, **points)

    def plotted(figure: str) -> str:
        return f'{call}.plot("{figure}{{side}}", layer={{layer}}, head={{head}})'

    return [
        Section(
            contents="Update magnitude",
            tab="write",
            heading="How much each head changes the stream",
            numbered=True,
            finding=_over_tokens(view, positive, partial(_about_magnitudes, nouns)),
            reading=_by_side(
                "Each histogram is one head of the selected layer: its update magnitudes ‖u‖ / ‖x‖ over the "
                f"{nouns.text}'s {nouns.tokens}, on a logarithmic axis.",
                sides,
            ),
            caveat=f"Each histogram is scaled to its fullest bin; hover over a bin for its number of {nouns.tokens}. "
            "Click a histogram to select its head. The axis spans all layers shown. Updates of exactly 0 are "
            "omitted from the logarithmic axis. A large update need not matter for the output.",
            figures={"magnitude": magnitude_histograms_chart(magnitude, SIDES, nouns=nouns)},
            call=plotted("magnitude"),
            choices=(SIDE,),
            rounding=f"update magnitudes are off by at most {bound(off)} of their value" if off else "",
        ),
        Section(
            contents="Update orientation",
            tab="write",
            heading="The direction in which each head moves the stream",
            numbered=True,
            finding=_over_tokens(view, orientation, _about_orientations),
            reading=_by_side(
                "Each histogram is one head: its update orientations cos(u, x). At 1 an update lengthens the stream, "
                "at 0 it is orthogonal to the stream, and below 0 it cancels part of the stream."
            ),
            caveat="Each histogram is scaled to its fullest bin. In many dimensions, two unrelated directions are "
            "nearly orthogonal, so values near 0 are expected by chance.",
            figures={"orientation": orientation_histograms_chart(orientation, SIDES, nouns=nouns)},
            call=plotted("orientation"),
        ),
        Section(
            contents="Orientation by magnitude",
            tab="write",
            heading="Orientation against magnitude",
            numbered=True,
            finding=_about_largest(view, magnitude, orientation),
            reading=_by_side(
                f"One point per {nouns.token} and head of the selected layer, marked by the key with the head's "
                f"highest attention at that {nouns.token}."
            ),
            caveat="A row with one visible key has no mark. Click a point to select its head.",
            figures={"orientation-by-magnitude": by_magnitude},
            call=plotted("orientation_by_magnitude"),
        ),
        Section(
            contents=f"Magnitude along the {nouns.text}",
            tab="write",
            heading=f"Magnitude along the {nouns.text}",
            numbered=True,
            finding=_about_marks(view, magnitude),
            reading=_by_side(
                f"The points of “Orientation against magnitude”, plotted by the position of the {nouns.query_token}."
            ),
            caveat=f"On the target side, a {nouns.first} with a very large ‖x‖ makes ‖u‖ / ‖x‖ small regardless of "
            "u: check the query side before concluding that a head attending to it writes nothing.",
            figures={"magnitude-by-position": magnitude_by_position_chart(magnitude, SIDES, **points)},
            call=plotted("magnitude_by_position"),
        ),
    ]


def _by_side(reading: str, more: dict[str, str] | None = None) -> ByChoice:
    words = more or {side: f"Shown: the {side} side, as for update magnitudes." for side in SIDES}
    return ByChoice.texts(("side",), (len(SIDES),), lambda side: f"{reading} {words[SIDES[side]]}")


def _over_tokens(
    view: UpdateNumbers, values: Float[np.ndarray, "side layer head token"], words: Callable[[np.ndarray], str]
) -> ByChoice:
    def told(side: int, layer: int, head: int) -> str:
        numbers = values[side, layer, head]
        numbers = numbers[np.isfinite(numbers)]
        return f"L{view.layers[layer]}H{head}: {words(numbers)}" if numbers.size else _nothing(view, layer, head)

    return ByChoice.texts(_OF_HEAD, values.shape[:3], told)


def _about_magnitudes(nouns: Nouns, magnitude: Float[np.ndarray, " token"]) -> str:
    ends = f"from {magnitude.min():.2g} to {magnitude.max():.2g}"
    return f"median {np.median(magnitude):.2g} over {magnitude.size} {nouns.tokens}, {ends}."


def _about_orientations(orientation: Float[np.ndarray, " token"]) -> str:
    median = signed(float(np.median(orientation)), ".3f")
    count = int((orientation < 0).sum())
    verb = "points" if count == 1 else "point"
    against = f"{count} of {orientation.size} updates {verb} against the stream (below 0)"
    return f"median {median}; {against}."


def _about_largest(
    view: UpdateNumbers,
    magnitude: Float[np.ndarray, "side layer head token"],
    orientation: Float[np.ndarray, "side layer head token"],
) -> ByChoice:
    def told(side: int, layer: int, head: int) -> str:
        values = np.nan_to_num(magnitude[side, layer, head])
        if not values.any():
            return _nothing(view, layer, head)
        largest = int(values.argmax())
        cosine = float(orientation[side, layer, head, largest])
        return (
            f"L{view.layers[layer]}H{head} is largest at {view.nouns.token} {largest} {quoted(view.tokens[largest])}: "
            f"magnitude {values[largest]:.2g}, orientation {signed(cosine, '.3f')}."
        )

    return ByChoice.texts(_OF_HEAD, magnitude.shape[:3], told)


def _about_marks(view: UpdateNumbers, magnitude: Float[np.ndarray, "side layer head token"]) -> ByChoice:
    marks = marks_of(view.attended)

    def told(side: int, layer: int) -> str:
        parts = []
        for code, style in enumerate(marks_for(view.nouns).values()):
            values = magnitude[side, layer][marks[layer] == code]
            values = values[values > 0]
            if values.size:
                parts.append(f"{np.median(values):.2g} for {style.label} ({values.size})")
        if not parts:
            return "No head has an update to show."
        return (
            "Median magnitude over all heads of the layer, by the key with the highest attention (number of "
            f"points): {', '.join(parts)}."
        )

    return ByChoice.texts(("side", "layer"), magnitude.shape[:2], told)


def _nothing(view: UpdateNumbers, layer: int, head: int) -> str:
    return f"L{view.layers[layer]}H{head} has no update to show."
