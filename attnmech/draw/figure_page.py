"""One offline HTML page with a few views, one below the other, and the table of their numbers."""

from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd

from .embed import View, in_notebook, page_of_views, plotly_view
from .section import Section
from .text import html_text

MOST_IN_A_CELL: Final = 4
"""A notebook's cell shows at most this many figures of a result."""


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
        {name: view for section in sections for name, view in _views(section).items()},
        sections,
        title=title,
        lead=lead,
        table="" if frame is None else table_html(frame),
        provenance=provenance,
    )


def in_notebook_output(*, title: str, lead: str, sections: Sequence[Section], frame: pd.DataFrame) -> str:
    """The same in a notebook's cell: what was found, the figures, and the table behind a fold."""
    shown = "".join(
        f'<p class="attnmech-reading">{html_text(" ".join(filter(None, (section.heading, str(section.reading)))))}</p>'
        f"{in_notebook(_views(section).values())}"
        for section in sections[:MOST_IN_A_CELL]
    )
    if len(sections) > MOST_IN_A_CELL:
        further = f"{len(sections) - MOST_IN_A_CELL} further figures are on the page that .write_html(path) writes."
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


def _views(section: Section) -> dict[str, View]:
    """The section's figures as views of their own."""
    return {
        name: figure if isinstance(figure, View) else plotly_view(figure, title=section.heading)
        for name, figure in section.figures.items()
    }
