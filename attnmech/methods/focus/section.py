"""The section of a page on where heads attend: figures 4 to 6, with the selected head compared with all heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...basics.nouns import Nouns
from ...draw.chart import ByChoice
from ...draw.numbers import FocusNumbers
from ...draw.section import Section
from ...draw.text import percent
from .figures import focus_chart, rank_lines

MANY: Final = 0.5  # a head attends to a token that has the highest score in at least this share of rows

_RANKS_JOINED: Final = (
    "Each line joins heads of equal rank: the highest of each layer, the second highest, and so on. It does not "
    "follow one head across layers; the hover box names the head."
)


@dataclass(frozen=True)
class _Figure:
    number: str  # the name of the statistic that the figure shows, in a `FocusNumbers`
    name: str
    contents: str
    heading: str
    reading: str
    caveat: str
    many: str  # describes a head whose value is at least one half
    written: Callable[[float], str] = percent


def _figures(nouns: Nouns, *, crosses: bool) -> list[_Figure]:
    """The figures; in cross-attention, no key is the token itself."""
    first = f"first {nouns.key_token}" if crosses else nouns.first
    other = (
        ""
        if crosses
        else (
            f" Rows whose highest score is at any other {nouns.token} count neither here nor as attention to the "
            f"{nouns.token} itself."
        )
    )
    itself = _Figure(
        "self_top",
        "self_focus",
        "Attention to itself",
        f"How often heads attend most to the {nouns.token} itself",
        f"Each point is one head: the fraction of its rows whose highest score is at the {nouns.query_token} itself.",
        _RANKS_JOINED,
        f"attending most to the {nouns.token} itself in at least half of the rows",
    )
    return [
        *([] if crosses else [itself]),
        _Figure(
            "first_top",
            "first_focus",
            f"Attention to the {'first key' if crosses else first}",
            f"How often heads attend most to the {first}",
            "Each point is one head: the fraction of its rows whose highest score is at position 0"
            f"{f' of the {nouns.key_text}' if crosses else ''}.",
            f"{_RANKS_JOINED}{other}",
            f"attending most to the {first} in at least half of the rows",
        ),
        _Figure(
            "concentration",
            "concentration",
            "Concentration",
            "How concentrated attention is",
            "The mean over rows of p(1) − p(2), the highest probability after softmax minus the second highest. Near "
            f"1, a head attends to one {nouns.of_keys.token} at a time; near 0, to several.",
            f"{_RANKS_JOINED}{'' if crosses else ' Rows with few visible keys count as much as rows with many.'}",
            "reaching 0.5",
            "{:.3f}".format,
        ),
    ]


def focus_sections(view: FocusNumbers, call: str, layers: Sequence[int] = ()) -> list[Section]:
    """Figures 4 to 6 of all heads.

    Args:
        view: the numbers.
        call: the Python expression of the result, such as "focus".
        layers: the layers in which the reader of a page can select a head; if empty, no head is selected.

    """
    return [_section(view, figure, call, layers) for figure in _figures(view.nouns, crosses=view.crosses)]


def _section(view: FocusNumbers, figure: _Figure, call: str, layers: Sequence[int]) -> Section:
    rows = f"{view.rows[:1].upper()}{view.rows[1:].rstrip('.')}."
    intervals = (
        "Hover over a point for its interval."
        if view.low
        else f"Intervals are not available: another {view.nouns.text} may give different numbers."
    )
    name, number, reading = figure.name.replace("_", "-"), figure.number, figure.reading
    chart = focus_chart(view, number, layers) if layers else rank_lines(view, number)
    return Section(
        contents=figure.contents,
        heading=figure.heading,
        numbered=True,
        reading=f"{reading} Click a point to select its head." if layers else reading,
        caveat=f"{figure.caveat} {rows} {intervals}",
        figures={name: chart},
        finding=_place_of_head(view, figure, layers) if layers else "",
        call=f'{call}.plot("{figure.name}"' + (", layer={layer}, head={head})" if layers else ")"),
    )


def about_all_heads(view: FocusNumbers) -> str:
    """Says how many heads attend most to the first token, to the token itself or to the previous token."""

    def count(name: str) -> int:
        return int((getattr(view, name) >= MANY).sum())

    if view.crosses:
        return (
            f"Heads attending most to the first {view.nouns.key_token} in at least half of their rows: "
            f"{count('first_top')} of {view.self_top.size}."
        )
    return (
        f"Heads attending most to one {view.nouns.token} in at least half of their rows: {count('first_top')} to the "
        f"{view.nouns.first}, {count('self_top')} to the {view.nouns.token} itself, {count('previous_top')} to the "
        f"previous one (of {view.self_top.size} heads)."
    )


def _place_of_head(view: FocusNumbers, figure: _Figure, layers: Sequence[int]) -> ByChoice:
    """Sentences with the head's value, the highest value, and the number of heads whose value is at least one half."""
    values = getattr(view, figure.number)
    places = [view.layers.index(layer) for layer in layers]
    defined = np.isfinite(values)
    if not defined.any():
        return ByChoice.texts((), (), lambda: "No row is counted.")
    highest = float(np.nanmax(values))
    (first, *others) = np.argwhere(values == highest)
    more = f" and {len(others)} more" if others else ""
    rest = (
        f"Highest: {figure.written(highest)}, L{view.layers[first[0]]}H{first[1]}{more}. Heads {figure.many}: "
        f"{(values >= MANY).sum()} of {defined.sum()}."
    )

    def told(layer: int, head: int) -> str:
        own, before = (float(statistic[places[layer], head]) for statistic in (values, view.previous_top))
        known = figure.written(own) if np.isfinite(own) else "undefined"
        previous = ""
        if figure.number == "self_top" and np.isfinite(before):
            previous = (
                f" The selected head attends most to the previous {view.nouns.token} in {percent(before)} of rows."
            )
        return f"L{layers[layer]}H{head}: {known}. {rest}{previous}"

    return ByChoice.texts(("layer", "head"), (len(layers), values.shape[1]), told)
