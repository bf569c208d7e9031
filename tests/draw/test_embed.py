"""A page, or a notebook's outputs, contain each script once, even if the cell that contains it runs again."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import opening

from attnmech.draw import embed, scripts
from attnmech.draw.circuitsvis import colored_tokens
from attnmech.draw.embed import View, in_notebook, page_of_views, plotly_view
from attnmech.draw.figure_page import render_figures
from attnmech.draw.head_maps import effect_map
from attnmech.draw.scripts import of_question
from attnmech.draw.section import Section
from attnmech.draw.text import html_text
from attnmech.errors import InputError

STUB = Path(embed.__file__).with_name("__init__.pyi")


def carried(html: str) -> list[str]:
    return re.findall(r'data-attnmech="(\w+)-[0-9a-f]{8}"', html)


def some_view() -> View:
    return colored_tokens(np.array([0.5, 1.0]), ["a", "b"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel whose running cell a test can set."""
    state = SimpleNamespace(cell="one", execution_count=1, kernel=True)
    state.get_parent = lambda: {"metadata": {} if state.cell is None else {"cellId": state.cell}}
    monkeypatch.setattr(embed, "_shell", lambda: state)
    monkeypatch.setattr(embed, "_carried", {})
    return state


def test_a_notebook_carries_a_script_once(notebook: SimpleNamespace) -> None:
    assert carried(some_view()._repr_html_()) == ["attnmech", "circuitsvis"]
    assert carried(some_view()._repr_html_()) == []
    notebook.cell, notebook.execution_count = "two", 2
    assert carried(some_view()._repr_html_()) == []
    assert carried(plotly_view(go.Figure())._repr_html_()) == ["plotly"]
    notebook.cell, notebook.execution_count = "one", 3  # the cell that carries it runs again
    assert carried(some_view()._repr_html_()) == ["attnmech", "circuitsvis"]
    assert carried(some_view()._repr_html_()) == []


def test_where_cells_have_no_names_the_first_output_carries(
    notebook: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.cell = None
    assert carried(some_view()._repr_html_()) == ["attnmech", "circuitsvis"]
    notebook.execution_count = 2
    assert carried(some_view()._repr_html_()) == []
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())  # where outputs do not see each other
    for _ in range(2):
        assert carried(some_view()._repr_html_()) == ["attnmech", "circuitsvis"]


def test_outside_a_notebook_everything_is_carried() -> None:
    for _ in range(2):
        assert carried(in_notebook([some_view(), some_view()])) == ["attnmech", "circuitsvis"]


def test_a_saved_figure_is_called_as_its_heading_says(chromium: Any, tmp_path: Path) -> None:
    heading = "Figure 8. <b>Orientation</b> / ../layer 2"
    section = Section(heading, "reading", {"a": go.Figure(go.Scatter(x=[1, 2], y=[1, 2]))})
    html = render_figures(title="t", lead="l", sections=[section])
    with opening(chromium, html, tmp_path / "figures.html") as page:
        page.hover(".nsewdrag")
        with page.expect_download() as download:
            page.click(".modebar-btn[data-title='Save as SVG']")
        assert download.value.suggested_filename == "Figure_8_b_Orientation_b_layer_2.svg"
        picture = Path(download.value.path()).read_text("utf-8")
    assert "Figure 8. &lt;b&gt;Orientation&lt;/b&gt; / ../layer 2</text>" in picture


def test_a_page_carries_each_script_once() -> None:
    figure = go.Figure(go.Bar(y=[1, 2]))
    sections = [Section("a", "b", {"a": figure, "b": figure}), Section("e", "f", {"e": some_view()})]
    assert carried(render_figures(title="t", lead="l", sections=sections)) == ["attnmech", "plotly", "circuitsvis"]


def test_another_text_of_a_script_has_another_name() -> None:
    assert scripts.Script("a", "1").name != scripts.Script("a", "2").name


def test_too_large_a_view_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "MOST_BYTES", 1000)
    view = View("sentence", "My view", "", {"numbers": "x" * 3_000_000})
    with pytest.raises(InputError, match=r"My view would take 3 MB in a page; the limit is 0 MB\. Select one layer"):
        view._repr_html_()


def test_a_view_says_what_it_is() -> None:
    assert repr(some_view()) == "View('Tokens by value', 0.00 MB; shows itself in a notebook, or .write_html(path))"


@pytest.mark.browser
def test_views_of_a_notebook_share_scripts_that_come_later(
    notebook: SimpleNamespace, chromium: Any, tmp_path: Path
) -> None:
    """The second output is the first in the document, as when cells were run out of order."""
    label = "<b>nats</b>"
    figure = effect_map(np.array([[0.5, -1.0]]), np.zeros((1, 2)), np.ones((1, 2)), layers=[3], label=label)
    first, second = plotly_view(figure)._repr_html_(), plotly_view(figure)._repr_html_()
    html = (
        f"<!doctype html><meta charset=utf-8><body style='background:#111'>{second}{some_view()._repr_html_()}{first}"
    )
    with opening(chromium, html, tmp_path / "notebook.html", ready=".attnmech-paper span") as page:
        page.wait_for_selector(".js-plotly-plot >> nth=1")
        schemes = page.eval_on_selector_all(".attnmech", "all => all.map(one => one.style.colorScheme)")
        assert set(schemes) == {"dark"}
        assert page.eval_on_selector(".js-plotly-plot", "one => getComputedStyle(one).color") == "rgb(230, 232, 235)"


@pytest.mark.browser
@pytest.mark.parametrize("in_page", [True, False])
def test_a_question_adds_its_script_and_style(
    in_page: bool, notebook: SimpleNamespace, chromium: Any, tmp_path: Path
) -> None:
    """It sees the names shared by attnmech's own script, which is included once."""
    script, style = tmp_path / "counted.js", tmp_path / "counted.css"
    sum_of = 'make("p", { className: "sum", text: signed(data.of, 1) })'
    script.write_text(f"views.counted = (stage, data) => stage.append({sum_of});")
    style.write_text(".sum { color: rgb(1, 2, 3); }")
    counted = View("counted", "t", "", {"of": 2}, (of_question("counted", (script, style)),))
    plain = plotly_view(go.Figure(go.Bar(y=[1, 2])))
    if in_page:
        blank = dict.fromkeys(("heading", "finding", "choices", "caveat", "call", "reading"), "")
        sections = [blank | {"anchor": "a", "figures": ["plain", "counted"]}]
        html = page_of_views({"plain": plain, "counted": counted}, sections, title="t", lead="l")
        assert carried(html) == ["attnmech", "plotly", "counted"]
    else:
        html = f"<!doctype html><meta charset=utf-8>{plain._repr_html_()}{counted._repr_html_()}"
        assert carried(html) == ["attnmech", "plotly", "counted"]
    with opening(chromium, html, tmp_path / "page.html", ready=".sum") as page:
        page.wait_for_selector(".js-plotly-plot")
        assert page.text_content(".sum") == "+2.0"
        assert page.eval_on_selector(".sum", "sum => getComputedStyle(sum).color") == "rgb(1, 2, 3)"


@pytest.mark.browser
@pytest.mark.parametrize("background", ["#ffffff", "#1e1e1e"])
def test_outputs_in_a_frame_of_another_origin_are_drawn(
    background: str, page_html: str, chromium: Any, tmp_path: Path
) -> None:
    """Colab and VS Code show outputs so: without a network, the page around them, or storage."""
    frame = '<iframe style="width:100%;height:600px"'
    report = f'{frame} srcdoc="{html_text(page_html)}"></iframe>'
    outputs = f"{some_view()._repr_html_()}{plotly_view(go.Figure(go.Bar(y=[1, 2])))._repr_html_()}{report}"
    output = f"<body style='background: {background}'>{outputs}"
    html = f'<!doctype html><meta charset=utf-8>{frame} sandbox="allow-scripts" srcdoc="{html_text(output)}"></iframe>'
    with opening(chromium, html, tmp_path / "notebook.html", ready="iframe") as page:
        inner = page.frames[1]
        inner.wait_for_selector(".attnmech-paper span")
        inner.wait_for_selector(".main-svg", state="attached")
        inner.frame_locator("iframe").locator("html[data-ready]").wait_for(state="attached")
        assert inner.evaluate("origin") == "null"
        assert inner.evaluate("try { localStorage; '' } catch (error) { error.name }") == "SecurityError"
        schemes = inner.eval_on_selector_all(".attnmech[id]", "all => all.map(one => one.style.colorScheme)")
        assert set(schemes) == {"light" if background == "#ffffff" else "dark"}


@pytest.mark.browser
def test_a_figure_of_a_notebook_is_printed_within_the_page(chromium: Any, tmp_path: Path) -> None:
    """The page is laid out after the figures are drawn, too late to measure it."""
    html = f"<!doctype html><meta charset=utf-8>{plotly_view(go.Figure(go.Bar(y=[1, 2])))._repr_html_()}"
    width = "document.querySelector('.main-svg').clientWidth"
    with opening(chromium, html, tmp_path / "notebook.html", ready=".main-svg") as page:
        before = page.evaluate(width)
        assert before > 1000
        for event, expected in (("beforeprint", 560), ("afterprint", before)):
            page.evaluate(f"dispatchEvent(new Event('{event}'))")
            assert page.evaluate(width) == expected


@pytest.mark.browser
def test_an_output_whose_script_runs_twice_is_drawn_once(chromium: Any, tmp_path: Path) -> None:
    """Some front ends run an output's scripts themselves."""
    output = some_view()._repr_html_()
    start = output[output.rindex("<script>") : output.rindex("</script>")] + "</script>"
    html = f"<!doctype html><meta charset=utf-8>{output}{start}"
    with opening(chromium, html, tmp_path / "notebook.html", ready=".attnmech-paper span") as page:
        page.wait_for_timeout(200)
        assert page.locator(".attnmech-paper").count() == 1


@pytest.mark.browser
def test_a_view_without_its_script_says_so(notebook: SimpleNamespace, chromium: Any, tmp_path: Path) -> None:
    some_view()._repr_html_()
    html = f"<!doctype html><meta charset=utf-8>{some_view()._repr_html_()}"
    with opening(chromium, html, tmp_path / "notebook.html") as page:
        page.wait_for_selector("text=needs a script from another cell of the notebook", timeout=10000)


@pytest.mark.browser
def test_a_view_that_fails_says_why(chromium: Any, tmp_path: Path) -> None:
    path = View("nothing", "t", "", {}).write_html(tmp_path / "view.html")
    with (
        pytest.raises(AssertionError, match="not a function"),
        opening(chromium, path.read_text("utf-8"), path) as page,
    ):
        page.wait_for_selector("text=This view could not be drawn")


def test_every_public_name_of_the_package_is_a_thing_to_call() -> None:
    """Works even if a file of the same name was imported first."""
    import attnmech.draw as draw

    assert {"model_view", "sentence_view", "token_graph", "attention_heads", "row_ledger", "View"} <= set(draw.__all__)
    for name in draw.__all__:
        module = next(line for line in STUB.read_text().splitlines() if line.endswith(f" as {name}")).split()[1]
        importlib.import_module(f"attnmech.draw{module}")
        assert callable(getattr(draw, name)), name
