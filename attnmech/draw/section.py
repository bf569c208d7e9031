"""A section of a page: what a method says about its numbers, beside the figures that show them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .chart import ByChoice, Chart
from .embed import View


@dataclass(frozen=True)
class Choice:
    """Something that a reader of a page chooses, besides layer, head and query."""

    name: str
    """Its name in addresses and in `ByChoice.over`."""
    label: str
    values: tuple[int | str, ...]
    """What there is to choose, as written in addresses and calls; the first is chosen at the beginning."""
    words: tuple[str, ...] = ()
    """The same in words, for readers."""
    in_calls: tuple[str, ...] = ()
    """The same as Python, if a call writes it otherwise."""
    everywhere: bool = False
    """Whether it is at the top of the page, since several sections depend on it."""


@dataclass(frozen=True)
class OfPattern:
    """A view of the attention that the page carries: all heads, lines between tokens, or a graph."""

    kind: Literal["model", "sentence", "token_graph"]
    remarks: tuple[str, ...] = ()
    """A remark on each head, layer by layer, for the hover box of the small maps."""


@dataclass(frozen=True)
class Section:
    """A heading, a finding, figures, how to read them, a caveat, and the call that makes them again.

    Where a page offers a choice, texts and figures may follow it (`ByChoice`, `Chart`), and `{layer}`, `{head}`,
    `{rank}`, … in `call` stand for what is chosen.
    """

    heading: str
    reading: str | ByChoice
    figures: Mapping[str, go.Figure | Chart | View | OfPattern]
    """By the ids of their elements; several stand side by side."""
    call: str = ""
    name: str = ""
    """The id of its anchor; the first figure's, if left out."""
    contents: str = ""
    """Its entry in the table of contents; the heading, if left out."""
    finding: str | ByChoice = ""
    """The sentence that the numbers support."""
    caveat: str = ""
    choices: tuple[Choice, ...] = field(default=())
    """What the section offers to choose."""
    rounding: str = ""
    """How far numbers on a page may be from those that were measured, as the end of a sentence."""

    @property
    def anchor(self) -> str:
        """The id of its place on a page, without "-section"."""
        return self.name or next(iter(self.figures))
