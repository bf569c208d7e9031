"""An offline HTML page with a column of views and a table of their numbers."""

from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd

from .embed import View, in_notebook, page_of_views, plotly_view
from .section import Section
from .text import html_text

MOST_IN_A_CELL: Final = 4  # the most figures of a result that a notebook cell shows


def render_figures(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    frame: pd.DataFrame | None = None,
    provenance: Mapping[str, str] | None = None,
) -> str:
    """The whole page as HTML for a UTF-8 file; it opens without a network."""
    return page_of_views(
        {name: view for section in sections for name, view in _views(section).items()},
        sections,
        title=title,
        lead=lead,
        table="" if frame is None else table_html(frame),
        provenance=provenance,
    )


def in_notebook_output(*, title: str, lead: str, sections: Sequence[Section], frame: pd.DataFrame) -> str:
    """The same content for a notebook cell: the finding, the figures, and a folded table."""
    shown = "".join(
        f'<p class="attnmech-title">{html_text(section.heading)}</p>'
        f'<p class="attnmech-reading">{html_text(str(section.reading))}</p>{in_notebook(_views(section).values())}'
        for section in sections[:MOST_IN_A_CELL]
    )
    if len(sections) > MOST_IN_A_CELL:
        further = f"Further figures are on the page that .write_html(path) writes: {len(sections) - MOST_IN_A_CELL}."
        shown += f'<p class="attnmech-reading">{further}</p>'
    return (
        f'<div class="attnmech"><p class="attnmech-title">{html_text(title)}</p>'
        f'<p class="attnmech-finding">{html_text(lead)}</p>{shown}'
        f"<details><summary>The numbers</summary>{table_html(frame)}</details></div>"
    )


def table_html(frame: pd.DataFrame) -> str:
    """A table that scrolls within the page, with the note on its intervals; ends of unknown intervals are left out."""
    note = f"<p>{html_text(frame.attrs['intervals'])}</p>" if "intervals" in frame.attrs else ""
    known = [name for name in frame if not (str(name).endswith(("_low", "_high")) and frame[name].isna().all())]
    html = frame[known].to_html(
        index=False, escape=True, border=0, na_rep="", float_format=lambda value: f"{value:.3g}"
    )
    return f'{note}<div class="table attnmech-table">{html}</div>'


def _views(section: Section) -> dict[str, View]:
    return {
        name: figure if isinstance(figure, View) else plotly_view(figure, title=section.heading)
        for name, figure in section.figures.items()
    }
