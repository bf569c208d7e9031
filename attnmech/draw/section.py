"""A section of a page: what a method says about its numbers, with the figures that show them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, Literal

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .chart import ByChoice, Chart
from .embed import View

Tab = Literal["look", "why", "write", "matter", "token", "model"]

TABS: Final[Mapping[Tab, str]] = {
    "look": "Where it attends",
    "why": "Why there",
    "write": "What it writes",
    "matter": "Does it matter?",
    "token": "This {token}",
    "model": "Model",
}
"""The questions by which a page groups its sections; `{token}` is the word for a position."""


@dataclass(frozen=True)
class Choice:
    """A choice that a page offers its reader besides layer, head and query."""

    name: str  # the name in addresses and in `ByChoice.over`
    label: str
    values: tuple[int | str, ...]  # the options, as written in addresses and calls; the page starts with the first
    words: tuple[str, ...] = ()  # the options in words, for readers
    in_calls: tuple[str, ...] = ()  # the options as Python, if calls write them differently
    everywhere: bool = False  # whether the choice is at the top of the page, because several sections depend on it


@dataclass(frozen=True)
class OfPattern:
    """A view of the attention that the page carries: all heads, lines between tokens, or a graph."""

    kind: Literal["model", "sentence", "token_graph"]
    remarks: tuple[str, ...] = ()  # a remark on each head, layer by layer, for the hover box of the small maps


@dataclass(frozen=True)
class Section:
    """A heading, a finding, figures, how to read them, a caveat, and the call that reproduces them.

    Texts and figures may follow the choices that a page offers (`ByChoice`, `Chart`). The reader's choices replace
    `{layer}`, `{head}`, `{rank}`, … in `call`.
    """

    heading: str
    reading: str | ByChoice
    figures: Mapping[str, go.Figure | Chart | View | OfPattern]
    """The figures, by the ids of their elements; several are shown side by side."""
    call: str = ""
    name: str = ""  # the id of the section's anchor; by default the id of the first figure
    contents: str = ""  # the section's entry in the table of contents; by default the heading
    finding: str | ByChoice = ""  # the sentence that the numbers support
    caveat: str = ""
    choices: tuple[Choice, ...] = field(default=())  # the choices that the section offers
    rounding: str = ""  # the rounding error of the section's numbers on a page, as the end of a sentence
    tab: Tab = "model"  # the question of `TABS` under which a page shows the section
    numbered: bool = False  # whether a page with tabs numbers the section as a figure

    @property
    def anchor(self) -> str:
        """The id of the section's element on a page, without "-section"."""
        return self.name or next(iter(self.figures))


def in_page_order(sections: Sequence[Section]) -> list[Section]:
    """The sections tab by tab, with the numbers of figures in that order; those with a number keep it.

    >>> write, look = (Section(name, "", {}, tab=name, numbered=True) for name in ("write", "look"))
    >>> [section.heading for section in in_page_order([write, look])]
    ['Figure 1. look', 'Figure 2. write']
    """
    ordered = sorted(sections, key=lambda section: list(TABS).index(section.tab))
    number = count(1)
    for place, section in enumerate(ordered):
        if section.numbered:
            figure, contents = next(number), section.contents or section.heading
            heading = f"Figure {figure}. {section.heading}"
            ordered[place] = replace(section, heading=heading, contents=f"{figure} {contents}", numbered=False)
    return ordered
