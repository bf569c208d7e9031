"""One offline HTML page with a few views, one below the other, and the table of their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from attnmech.draw.embed import View, in_notebook, page_of_views, plotly_view
from attnmech.draw.text import html_text

MOST_IN_A_CELL: Final = 4
"""A notebook's cell shows at most so many figures of a result."""


@dataclass(frozen=True)
class Section:
    """A figure with its heading, what it shows, and the Python that makes it again."""

    heading: str
    reading: str
    figure: go.Figure | View
    call: str = ""

    @property
    def view(self) -> View:
        """The figure as a view."""
        return self.figure if isinstance(self.figure, View) else plotly_view(self.figure, title=self.heading)


def render_figures(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    frame: pd.DataFrame | None = None,
    provenance: Mapping[str, str] | None = None,
) -> str:
    """The whole page as HTML, to be written as UTF-8; it opens from a file without a network."""
    return page_of_views(
        [each.view for each in sections],
        title=title,
        lead=lead,
        body=lambda elements: "".join(map(_section_html, sections, elements)),
        table="" if frame is None else f"<section><h2>The numbers</h2>{table_html(frame)}</section>",
        provenance=provenance_html(provenance or {}),
    )


def in_notebook_output(*, title: str, lead: str, sections: Sequence[Section], frame: pd.DataFrame) -> str:
    """The same in a notebook's cell: what was found, the figures, and the table behind a fold."""
    shown = "".join(
        f'<p class="attnmech-reading">{html_text(" ".join(filter(None, (each.heading, each.reading))))}</p>'
        f"{in_notebook([each.view])}"
        for each in sections[:MOST_IN_A_CELL]
    )
    if len(sections) > MOST_IN_A_CELL:
        further = f"{len(sections) - MOST_IN_A_CELL} further figures stand on the page that .to_html(path) writes."
        shown += f'<p class="attnmech-reading">{further}</p>'
    return (
        f'<div class="attnmech"><p class="attnmech-title">{html_text(title)}</p>'
        f'<p class="attnmech-finding">{html_text(lead)}</p>{shown}'
        f"<details><summary>The numbers</summary>{table_html(frame)}</details></div>"
    )


def table_html(frame: pd.DataFrame) -> str:
    """A table that scrolls in its own place, with what it says of its intervals."""
    note = f"<p>{html_text(frame.attrs['intervals'])}</p>" if "intervals" in frame.attrs else ""
    html = frame.to_html(index=False, escape=True, border=0, na_rep="", float_format=lambda value: f"{value:.3g}")
    return f'{note}<div class="table attnmech-table">{html}</div>'


def provenance_html(provenance: Mapping[str, str]) -> str:
    """What the numbers came from, as the entries of a `<dl>`."""
    return "".join(
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in provenance.items()
    )


def _section_html(section: Section, element: str) -> str:
    heading = f"<h2>{html_text(section.heading)}</h2>" if section.heading else ""
    call = f"<pre><code>{html_text(section.call)}</code></pre>" if section.call else ""
    return f"<section>{heading}<p>{html_text(section.reading)}</p>{element}{call}</section>"
