"""Pages hold the stated build of plotly.js, and the full build only if a figure needs it."""

import re
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs_version

from attnmech.draw import scripts
from attnmech.draw.embed import plotly_view
from attnmech.draw.numbers import ScoreNumbers
from attnmech.draw.section import Section

from .conftest import page, sections_of

VENDORED = files("attnmech.draw") / "vendored"


def test_the_vendored_build_is_the_one_stated_with_its_licence() -> None:
    stated = dict(line.split()[::-1] for line in (VENDORED / "SHA256SUMS").read_text().splitlines())
    assert stated.keys() == {"plotly-cartesian.min.js", "LICENSE.plotly.js"}
    for name, digest in stated.items():
        assert sha256((VENDORED / name).read_bytes()).hexdigest() == digest, name
    head = scripts.plotly().text[:300]
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}\n" in head, "run .ci/plotly"
    assert "Licensed under the MIT license" in head
    assert (VENDORED / "LICENSE.plotly.js").read_text().startswith("MIT License")


def test_it_draws_the_types_of_traces_that_are_listed() -> None:
    assert set(re.findall(r'moduleType:"trace",name:"(\w+)"', scripts.plotly().text)) == scripts.CARTESIAN


@pytest.mark.parametrize(
    ("traces", "whole"),
    [([], False), ([go.Heatmap(), go.Bar(), go.Scatter()], False), ([go.Scatter(), go.Scatter3d()], True)],
)
def test_a_figure_brings_the_smallest_build_that_draws_it(traces: list[object], whole: bool) -> None:
    script = scripts.whole_plotly() if whole else scripts.plotly()
    assert plotly_view(go.Figure(traces)).libraries == (script,)


def test_a_page_carries_the_whole_only_for_a_figure_that_needs_it(view: ScoreNumbers) -> None:
    for figure, script in ((go.Figure(go.Table()), scripts.plotly()), (go.Figure(go.Pie()), scripts.plotly())):
        assert script.carrier in page(view, sections_of(view, Section("One", "reading", {"one": figure})))
    html = page(view, sections_of(view, Section("One", "reading", {"one": go.Figure(go.Scatter3d())})))
    assert scripts.whole_plotly().carrier in html
    assert scripts.plotly().carrier not in html


def test_the_checker_joins_the_same_scripts_in_the_same_order() -> None:
    checker = Path(__file__).parents[2] / ".ci/javascript"
    assert tuple(re.findall(r"\b(page\w*\.js)\b(?=.* >)", (checker / "package.json").read_text())) == scripts.PAGE
    views = re.findall(r"attnmech/draw/(\w+\.js)", (checker / "views.json").read_text())
    assert tuple(views[: len(scripts.VIEWS)]) == scripts.VIEWS
