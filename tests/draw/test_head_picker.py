"""A head picker shows the figure that `plot` gives for the chosen head."""

import gzip
import json
from base64 import b64decode
from copy import deepcopy
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from browser import opening

from attnmech.draw.head_picker import head_picker


def bars(layer: int, head: int) -> go.Figure:
    """Figures of a different length for each head, with a line only in the first."""
    lines = [go.Scatter(x=[0, 1], y=[0, layer])] if head == 0 else []
    return go.Figure([go.Bar(x=[layer + 1.5] * (head + 1), y=["a", "<b>", "c"][: head + 1]), *lines])


def figures_of(data: Any) -> list[Any]:
    """The figures that a page builds from the first one and the differences from it."""
    found = []
    for changes in json.loads(gzip.decompress(b64decode(data["changes"]))):
        figure = deepcopy({name: data[name] for name in ("data", "layout")})
        for (*way, last), value in json.loads(changes):
            place = figure
            for step in way:
                place = place[step]
            place[last] = value
        found.append(figure)
    return found


@pytest.mark.parametrize(("layer", "head"), [(2, 0), (5, 2)])
def test_every_head_has_its_own_figure(layer: int, head: int) -> None:
    view = head_picker(bars, (2, 5), 3, layer=layer, head=head, title="Bars", reading="")
    expected = [json.loads(bars(at, of).to_json()) for at in (2, 5) for of in range(3)]
    assert figures_of(view.data) == expected


@pytest.mark.browser
def test_a_reader_chooses_a_head(chromium: Any, tmp_path: Path) -> None:
    view = head_picker(bars, (2, 5), 3, layer=5, head=0, title="Bars", reading="")
    with opening(chromium, view.write_html(tmp_path / "bars.html").read_text("utf-8"), tmp_path / "bars.html") as page:
        drawn = "document.querySelector('.js-plotly-plot').data.map(({ y }) => Array.from(y))"
        page.wait_for_selector(".js-plotly-plot")
        assert page.evaluate(drawn) == [["a"], [0, 5]]
        page.select_option("select >> nth=0", label="2")
        page.select_option("select >> nth=1", label="2")
        page.wait_for_function(f"{drawn}.length === 1")
        assert page.evaluate(drawn) == [["a", "<b>", "c"]]
        assert page.evaluate("document.querySelector('.js-plotly-plot').data[0].x.length") == 3
