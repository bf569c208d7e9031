"""A notebook shows a figure as a view; results have one way to write pages, and another to save numbers."""

import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any, get_type_hints

import models
import numpy as np
import plotly.graph_objects as go
import pytest
from comparing import refuses
from IPython.core.formatters import DisplayFormatter

import attnmech as am
from attnmech.draw.figure import Figure
from attnmech.errors import OutputError
from attnmech.methods.scores.figures import key_terms_chart


def key_terms(terms: dict[str, list[float]], tokens: list[str]) -> Figure:
    chart = key_terms_chart({name: np.array([[values]]) for name, values in terms.items()}, tokens)
    return chart.figure(layer=0, head=0)


def test_ipython_shows_the_numbers_as_html_alone() -> None:
    figure = key_terms({"position": [0.0, 1.0, 5.0]}, ["</script>", " b", " c"])
    bundle, _ = DisplayFormatter().format(figure)
    assert set(bundle) == {"text/html", "text/plain"}
    (numbers,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', bundle["text/html"])
    assert json.loads(numbers) == json.loads(figure.to_json())
    assert bundle["text/plain"] == "Figure(scatter; shows itself in a notebook, or .show())"


def test_a_changed_or_copied_figure_is_still_one() -> None:
    figure = key_terms({"position": [0.0, 1.0, 5.0]}, ["a", " b", " c"]).update_layout(height=300)
    assert isinstance(figure, go.Figure)
    assert isinstance(figure, Figure)
    assert pickle.loads(pickle.dumps(figure)) == figure
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)


def test_the_numbers_of_a_figure_as_a_table() -> None:
    lines = key_terms({"position": [0.0, 1.0, 5.0], "key_bias": [2.0, 3.0, 4.0]}, ["<s>", "b", "c"])
    frame = lines.to_frame()
    assert len(lines.data) == 2 and frame.trace.nunique() == 2
    for drawn in lines.data:
        assert frame[frame.trace == drawn.name].y.tolist() == list(drawn.y)
    assert any("<s>" in str(value) for value in frame.to_numpy().ravel())  # as read, not as HTML
    cells = Figure(
        go.Heatmap(z=[[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]], x=["a", "b", "c"], y=[7, 8], name="map")
    ).to_frame()
    assert cells.columns.tolist() == ["trace", "x", "y", "z"]
    assert cells.z.tolist()[2:] == [3.0, 4.0, 5.0, 6.0] and np.isnan(cells.z[1])
    assert list(zip(cells.x, cells.y, strict=True)) == [(x, y) for y in (7, 8) for x in "abc"]
    assert Figure(go.Heatmap(z=[[1.0, 2.0]])).to_frame().x.tolist() == [0, 1]
    assert Figure().to_frame().empty


CLASSES = [kind for kind in (getattr(am.results, name) for name in dir(am.results)) if inspect.isclass(kind)]
PAGED = [kind for kind in (*CLASSES, am.draw.View) if hasattr(kind, "to_html") or hasattr(kind, "write_html")]


@pytest.mark.parametrize("kind", PAGED, ids=lambda kind: kind.__name__)
def test_to_html_returns_and_write_html_writes(kind: Any) -> None:
    returns, writes = inspect.signature(kind.to_html), inspect.signature(kind.write_html)
    hints = get_type_hints(kind.to_html)["return"], get_type_hints(kind.write_html)["return"]
    assert hints == (str, Path)
    options = list(returns.parameters.values())[1:]
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    assert [parameter.name for parameter in writes.parameters.values()][1:] == ["path", *(o.name for o in options)]
    for call in (lambda: kind.to_html(None, "page.html"), lambda: kind.to_html(None, path="page.html")):
        refuses(r"use write_html\(path\)", call)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_save_writes_numbers(kind: Any) -> None:
    """`load_result` reads everything that has `save`, but for activations; a report only has a page."""
    assert hasattr(kind, "save") == issubclass(kind, am.results.Result | am.results.Activations)


def test_the_pages(tmp_path: Path) -> None:
    split = am.decompose_scores(models.demo(), ["Anna sang.", "Tom gave a shell."])
    effects = am.ablate_heads(models.demo(), "Anna sang of shells.", heads=[(0, 1)])
    view = models.demo().run("Anna sang.", points=["pattern"]).show("pattern", layer=2)
    for thing in (split, effects, view, am.report(models.demo(), "Anna sang.")):
        path = thing.write_html(str(tmp_path / "page.html"))
        assert path == tmp_path / "page.html"
        assert path.read_text("utf-8") == thing.to_html()
        assert thing.to_html().startswith("<!doctype html>")
        refuses("there is no folder", thing.write_html, tmp_path / "nowhere" / "page.html", error=OutputError)


def test_what_a_report_says_of_save() -> None:
    with pytest.raises(AttributeError, match=r"write its page with write_html\(path\), .* `report.focus.save\(path\)`"):
        am.report(models.demo(), "Anna sang.").save("report.safetensors")
    with pytest.raises(AttributeError, match="'Report' object has no attribute 'nothing'"):
        am.report(models.demo(), "Anna sang.").nothing
