"""A head picker shows the figure that `plot` gives for the chosen head."""

import gzip
import itertools
import json
from base64 import b64decode
from copy import deepcopy
from pathlib import Path
from typing import Any

import models
import numpy as np
import plotly.graph_objects as go
import pytest
from browser import opening

import attnmech as am
from attnmech.draw.head_picker import head_picker
from attnmech.errors import InputError
from attnmech.methods.scores.figures import score_shares_chart

CHOICES = {"layer": (2, 5), "head": range(3)}


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
    view = head_picker(bars, CHOICES, chosen={"layer": layer, "head": head}, title="Bars", reading="")
    expected = [json.loads(bars(at, of).to_json()) for at in (2, 5) for of in range(3)]
    assert figures_of(view.data) == expected


def test_shares_have_a_control_for_the_rank_and_updates_one_for_the_layer() -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom", 1)
    split, updates = am.decompose_scores(hooked, ids), am.residual_updates(hooked, ids)
    view, of_text = split.show("score_shares", layer=1, head=2), split.numbers()
    chart = score_shares_chart(of_text.ranked_share, of_text.ranked_key, of_text.tokens)
    layers, heads, ranks = view.data["choices"].values()
    assert ranks == list(range(ids.shape[1])) and view.data["chosen"] == {"layer": 1, "head": 2, "rank": 0}
    for (layer, head, rank), figure in zip(itertools.product(layers, heads, ranks), figures_of(view.data), strict=True):
        expected = chart.figure(layer=split.layers.index(layer), head=head, rank=rank)
        drawn = go.Figure(figure)
        assert drawn.layout.legend.title.text == expected.layout.legend.title.text == f"the key of rank {rank} is"
        for one, other in zip(drawn.data, expected.data, strict=True):
            for axis in ("a", "b", "c") if one.type == "scatterternary" else ("x",):
                both = [np.array(trace[axis], dtype=float) for trace in (one, other)]
                np.testing.assert_allclose(*both, rtol=1e-5)
    for figure in ("magnitude_of_target", "orientation"):
        shown = updates.show(figure, layer=1)
        assert shown.data["choices"] == {"layer": list(updates.layers)} and shown.data["chosen"] == {"layer": 1}
        expected_figures = [updates.plot(figure, layer=layer) for layer in updates.layers]
        assert figures_of(shown.data) == [json.loads(expected.to_json()) for expected in expected_figures]
    with pytest.raises(InputError, match="a map of all layers"):
        updates.show("along")


@pytest.mark.browser
def test_a_reader_chooses_a_head(chromium: Any, tmp_path: Path) -> None:
    view = head_picker(bars, CHOICES, chosen={"layer": 5, "head": 0}, title="Bars", reading="")
    with opening(chromium, view.write_html(tmp_path / "bars.html").read_text("utf-8"), tmp_path / "bars.html") as page:
        drawn = "document.querySelector('.js-plotly-plot').data.map(({ y }) => Array.from(y))"
        page.wait_for_selector(".js-plotly-plot")
        assert page.evaluate(drawn) == [["a"], [0, 5]]
        page.select_option("select >> nth=0", label="2")
        page.select_option("select >> nth=1", label="2")
        page.wait_for_function(f"{drawn}.length === 1")
        assert page.evaluate(drawn) == [["a", "<b>", "c"]]
        assert page.evaluate("document.querySelector('.js-plotly-plot').data[0].x.length") == 3
