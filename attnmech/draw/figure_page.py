"""One offline HTML page with a few figures, one below the other, and the table of their numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from attnmech.draw.page import content_policy, package_text, provenance_html
from attnmech.draw.text import html_text, json_for_script


@dataclass(frozen=True)
class Section:
    """A figure with its heading, what it shows, and the Python that makes it again."""

    heading: str
    reading: str
    figure: go.Figure
    call: str


def render_figures(
    *, title: str, lead: str, sections: Sequence[Section], frame: pd.DataFrame, provenance: Mapping[str, str]
) -> str:
    """The whole page as HTML, to be written as UTF-8; it opens from a file without a network."""
    plotly, script = get_plotlyjs(), package_text("figure_page.js")
    figures = {f"figure-{number}": json.loads(each.figure.to_json()) for number, each in enumerate(sections)}
    return Template(package_text("figure_page.html")).substitute(
        policy=content_policy(plotly, script),
        style=package_text("page.css"),
        title=html_text(title),
        lead=html_text(lead),
        sections="".join(_section_html(number, each) for number, each in enumerate(sections)),
        table=frame.to_html(index=False, escape=True, border=0, na_rep="", float_format=lambda value: f"{value:.3g}"),
        provenance=provenance_html(provenance),
        plotly=plotly,
        data=json_for_script(figures),
        script=script,
    )


def _section_html(number: int, section: Section) -> str:
    return (
        f"<section><h2>{html_text(section.heading)}</h2><p>{html_text(section.reading)}</p>"
        f'<div class="figure" id="figure-{number}"></div><pre><code>{html_text(section.call)}</code></pre></section>'
    )
