"""In a real, offline browser: choices reach every figure, and hostile text does not run."""

import re
from base64 import b64encode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import opening

from attnmech.draw.focus import concentration, first_focus, self_focus
from attnmech.draw.ledger import row_ledger
from attnmech.draw.scores import attention_map, key_terms, share_bars, share_triangle
from attnmech.draw.text import signed, visible_token
from attnmech.draw.updates import (
    magnitude_by_position,
    magnitude_histograms,
    orientation_by_magnitude,
    orientation_histograms,
)
from attnmech.draw.view import FocusView, ScoreView, UpdateView

from .conftest import TOKENS

pytestmark = pytest.mark.browser


def traces(page: Any, figure: str) -> dict[str, dict[str, Any]]:
    """What plotly draws: the data arrays of each trace by the trace's `meta`."""
    drawn = page.evaluate(
        """id => document.getElementById(id).data.map(({meta, x, y, z, a, b, c, customdata}) =>
             ({meta, x, y, z, a, b, c, customdata}))""",
        figure,
    )
    return {trace["meta"]: trace for trace in drawn}


def assert_same_arrays(drawn: dict[str, dict[str, Any]], figure: Any) -> None:
    """The page's traces hold what the Python figure holds, up to 16-bit rounding."""
    assert list(drawn) == [trace.meta for trace in figure.data]
    for trace in figure.data:
        for name in ("x", "y", "z", "a", "b", "c", "customdata"):
            if name not in trace or trace[name] is None:
                continue
            expected = np.array(trace[name])
            if expected.dtype.kind == "f":
                shown = np.array(drawn[trace.meta][name], dtype=float).reshape(expected.shape)
                np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-4, err_msg=f"{trace.meta}.{name}")
            else:
                assert np.array(drawn[trace.meta][name]).tolist() == expected.tolist()


@pytest.mark.parametrize(("layer", "head", "rank"), [(0, 0, 0), (0, 2, 1), (1, 0, 3), (1, 1, 0)])
def test_the_page_draws_what_python_draws(opened: Any, view: ScoreView, layer: int, head: int, rank: int) -> None:
    opened.select_option("#layer", str(view.layers[layer]))
    opened.select_option("#head", str(head))
    opened.select_option("#rank", str(rank))
    keys = view.ranked_key[layer, head, :, rank]
    shares = {name: share[layer, head, :, rank] for name, share in view.ranked_share.items()}
    terms = {name: term[layer, head] for name, term in view.key_terms.items()}
    assert_same_arrays(traces(opened, "attention-map"), attention_map(view.scores[layer, head], view.tokens))
    assert_same_arrays(traces(opened, "share-triangle"), share_triangle(shares, keys, view.tokens))
    assert_same_arrays(traces(opened, "share-bars"), share_bars(shares, keys, view.tokens))
    assert_same_arrays(traces(opened, "key-terms"), key_terms(terms, view.tokens))


@pytest.mark.parametrize(("layer", "head", "query"), [(0, 0, 6), (1, 2, 3), (0, 1, 0)])
def test_the_ledger_is_that_of_the_chosen_row(opened: Any, view: ScoreView, layer: int, head: int, query: int) -> None:
    opened.select_option("#layer", str(view.layers[layer]))
    opened.select_option("#head", str(head))
    opened.click(f".token >> nth={query}")
    terms = {name: np.broadcast_to(term, view.scores.shape)[layer, head, query] for name, term in view.terms.items()}
    scores, pattern = view.scores[layer, head, query], view.pattern[layer, head, query]
    figure = row_ledger(terms, scores, pattern, view.tokens, query=query)
    drawn = traces(opened, "row-ledger")
    assert_same_arrays(drawn, figure)
    layout = opened.evaluate("document.getElementById('row-ledger').layout")
    assert layout["title"]["text"] == figure.layout.title.text
    assert layout["yaxis"]["categoryarray"] == list(figure.layout.yaxis.categoryarray)
    shown = opened.evaluate("document.getElementById('row-ledger').data.at(-1)")
    assert (shown["hovertext"], shown["text"]) == (list(figure.data[-1].hovertext), list(figure.data[-1].text))
    sentence = opened.inner_text("#row-ledger-finding")
    if query == 0:
        assert sentence.endswith("alone: it has no choice.")
    else:
        best, next_best = np.argsort(-pattern[: query + 1], kind="stable")[:2]
        assert sentence.startswith(f"The score of key {best} “")
        assert f"by {signed(float(scores[best] - scores[next_best]), '.3f')}: " in sentence
        assert f"key bias {signed(float(terms['key_bias'][best] - terms['key_bias'][next_best]), '.3f')}" in sentence


def test_a_small_map_chooses_its_head_for_the_whole_page(opened: Any, view: ScoreView) -> None:
    box = opened.locator("#model-view canvas").first.bounding_box()
    assert box["width"] > 0
    opened.evaluate("document.getElementById('model-view').control.choose({layer: 0, head: 0})")
    opened.focus("#model-view [tabindex='0']")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("Enter")
    assert [opened.input_value(f"#{name}") for name in ("layer", "head")] == ["5", "1"]
    drawn = traces(opened, "attention-map")["scores"]["z"]
    np.testing.assert_allclose(np.array(drawn, dtype=float), view.scores[1, 1], atol=1e-4)


def test_lines_and_edges_are_those_of_the_chosen_head(opened: Any, view: ScoreView) -> None:
    def weights(stage: str) -> Any:
        return opened.evaluate(f"document.getElementById('{stage}').control.weights()")

    opened.select_option("#layer", "5")
    opened.select_option("#head", "2")
    shown = np.array(weights("sentence-view")[0], dtype=float).reshape(7, 7)
    np.testing.assert_allclose(shown, view.pattern[1, 2], rtol=1e-3)
    opened.check("#sentence-view label:has-text('hide the first token') input")
    hidden = view.pattern[1, 2].copy()
    hidden[:, 0] = 0
    shown = np.array(weights("sentence-view")[0], dtype=float).reshape(7, 7)
    np.testing.assert_allclose(shown[1:], hidden[1:] / hidden[1:].sum(-1, keepdims=True), rtol=1e-3)
    edges = opened.evaluate("document.getElementById('token-graph').control.edges().length")
    assert edges == (view.pattern[1, 2] >= 0.1).sum()


def test_the_contents_lead_to_every_section_and_leave_the_address(opened_full: Any) -> None:
    opened_full.set_viewport_size({"width": 1280, "height": 700})
    sections = opened_full.eval_on_selector_all("[id$='-section']", "all => all.map(one => one.id.slice(0, -8))")
    assert opened_full.eval_on_selector_all("nav a", "all => all.map(one => one.dataset.section)") == sections
    before = opened_full.url
    opened_full.click("nav a[data-section='concentration']")
    opened_full.wait_for_selector("nav a[data-section='concentration'][aria-current]")
    assert opened_full.url == before
    assert 0 <= opened_full.locator("#concentration-section h2").bounding_box()["y"] < 200


def test_a_page_begins_where_it_is_told_to(chromium: Any, full_page_html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert '"start": null' in full_page_html
    full_page_html = full_page_html.replace('"start": null', '"start": {"layer": 5, "head": 1, "query": 4}')
    with opening(chromium, full_page_html, path, ready="html[data-whole]") as page:
        assert page.evaluate("location.hash") == "#layer=5&head=1&rank=0&query=4&side=query"
    with opening(chromium, full_page_html, path, address="#head=2", ready="html[data-whole]") as page:
        assert page.evaluate("location.hash") == "#layer=5&head=2&rank=0&query=4&side=query"


def test_figures_out_of_sight_are_drawn_when_they_come_into_sight_or_are_printed(
    chromium: Any, full_page_html: str, tmp_path: Path
) -> None:
    with opening(chromium, full_page_html, tmp_path / "page.html", ready="html[data-ready]") as page:
        assert not page.evaluate("'data' in document.getElementById('magnitude')")
        page.locator("#magnitude-section").scroll_into_view_if_needed()
        page.wait_for_selector("#magnitude .main-svg >> nth=0")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        drawn = page.eval_on_selector_all(".figure", "all => all.filter(one => one.data).length")
        assert drawn == 12
        assert page.is_hidden("nav")
        box = page.locator(".attnmech-sentence-box")
        assert box.evaluate("one => one.scrollHeight <= one.clientHeight")
        assert page.locator(".attnmech-sentence-box canvas").bounding_box()["height"] >= 24 * len(TOKENS)
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.is_visible("nav")
        assert page.locator(".attnmech-printing").count() == 0


def blank(page: Any) -> list[str]:
    """The figures in which nothing is drawn: no plotly data, no words, and only transparent canvases."""
    return list(
        page.eval_on_selector_all(
            ".figure",
            """all => all.filter(one => {
                 const inked = each => each.width && each.getContext("2d")
                   .getImageData(0, 0, each.width, each.height).data.some(Boolean);
                 const canvases = [...one.querySelectorAll("canvas")];
                 return !one.data && (!one.textContent.trim() || !canvases.every(inked));
               }).map(one => one.id)""",
        )
    )


@pytest.mark.parametrize("way", ["pdf", "media"])
def test_a_page_printed_at_once_has_every_figure(
    chromium: Any, full_page_html: str, view: ScoreView, tmp_path: Path, way: str
) -> None:
    with opening(chromium, full_page_html, tmp_path / "page.html", ready="html[data-ready]") as page:
        if way == "pdf":
            page.evaluate(
                """addEventListener("afterprint", () => {
                     window.edges = document.querySelectorAll("#token-graph path").length;
                     window.printed = [...document.querySelectorAll(".figure")].filter(one => !one.data).map(one =>
                       [one.id, one.childElementCount]);
                   }, {capture: true})"""
            )
            page.pdf(path=tmp_path / "page.pdf")
            printed = dict(page.evaluate("window.printed"))
            assert printed.keys() == {"model-view", "sentence-view", "token-graph", "expected-tokens"}
            assert all(printed.values()), printed
            assert page.evaluate("window.edges") == 2 * (view.pattern[0, 0] >= 0.1).sum()
        else:
            page.emulate_media(media="print")
            page.wait_for_selector("html.printing")
            assert blank(page) == []
            for bar in ("#controls", ".attnmech-sentence-heading"):
                assert page.locator(bar).evaluate("one => getComputedStyle(one).position") == "static"
            page.emulate_media(media="screen")
            page.wait_for_selector("html:not(.printing)")
        assert widths_beyond(page) == [0] * 12


def test_what_the_model_expects_is_shown_and_hostile_tokens_are_text(opened_full: Any) -> None:
    opened_full.wait_for_selector("#expected-tokens span")
    shown = opened_full.inner_text("#expected-tokens").replace("\u2060", "")
    assert visible_token(TOKENS[1]) in shown
    assert opened_full.inner_text("#expected-finding").startswith("The model gives this text ")
    assert opened_full.locator("#expected-tokens img, header img").count() == 0
    assert opened_full.evaluate("window.owned") is None


def test_another_head_changes_the_map_and_another_rank_the_bars(opened: Any) -> None:
    first_map, first_bars = traces(opened, "attention-map"), traces(opened, "share-bars")
    opened.click('[data-control="rank"][data-step="1"]')
    assert traces(opened, "attention-map") == first_map
    assert traces(opened, "share-bars") != first_bars
    opened.click('[data-control="head"][data-step="1"]')
    assert traces(opened, "attention-map") != first_map


def test_steppers_stop_at_the_ends_of_their_range(opened: Any) -> None:
    assert opened.inner_text("#layer-range") == "2–5"
    assert opened.inner_text("#rank-range") == "0–4"
    opened.click('[data-control="layer"][data-step="-1"]')
    assert opened.input_value("#layer") == "2"
    for _ in range(3):
        opened.click('[data-control="layer"][data-step="1"]')
    assert opened.input_value("#layer") == "5"


def test_the_address_keeps_the_choice(opened: Any) -> None:
    opened.select_option("#layer", "5")
    opened.select_option("#head", "2")
    opened.select_option("#rank", "3")
    opened.click(".token >> nth=4")
    assert opened.evaluate("location.hash") == "#layer=5&head=2&rank=3&query=4"
    drawn = traces(opened, "attention-map")
    opened.reload()
    opened.wait_for_selector("html[data-whole]", state="attached")
    assert traces(opened, "attention-map") == drawn
    assert [opened.input_value(f"#{name}") for name in ("layer", "head", "rank")] == ["5", "2", "3"]
    assert opened.get_attribute('.token[aria-pressed="true"]', "title").startswith("token 4:")


@pytest.mark.parametrize("name", ["constructor", "toString", "__proto__", "valueOf"])
def test_an_address_of_names_that_every_object_has_is_ignored(
    chromium: Any, page_html: str, tmp_path: Path, name: str
) -> None:
    with opening(chromium, page_html, tmp_path / "page.html", address=f"#{name}=2", ready="html[data-ready]") as page:
        assert page.evaluate("location.hash") == "#layer=2&head=0&rank=0&query=6"


def test_no_figure_can_be_sent_anywhere(opened_full: Any) -> None:
    opened_full.hover("#concentration .nsewdrag")
    buttons = opened_full.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title)")
    assert "Reset axes" in buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title or "dit" in title]
    contexts = opened_full.eval_on_selector_all(
        ".js-plotly-plot", "all => all.map(one => one._context.plotlyServerURL)"
    )
    assert set(contexts) == {""}


def saved(page: Any, figure: str, button: str) -> Path:
    """What a button of a figure downloads, under the name that it suggests."""
    page.hover(f"{figure} .nsewdrag")
    with page.expect_download() as download:
        page.click(f"{figure} .modebar-btn[data-title='{button}']")
    path = Path(download.value.path()).with_name(download.value.suggested_filename)
    download.value.save_as(path)
    return path


COLOURS = """bytes => new Promise(proceed => {
  const image = new Image();
  image.onload = () => {
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    const all = canvas.getImageData(0, 0, image.width, image.height).data;
    proceed([image.width, all.every((value, at) => at % 4 < 3 || value === 255), [...all.slice(0, 3)]]);
  };
  image.src = `data:image/png;base64,${bytes}`;
})"""


@pytest.mark.parametrize(("theme", "background"), [("light", [255, 255, 255]), ("dark", [21, 23, 28])])
def test_a_saved_picture_has_a_name_a_title_and_a_background(
    opened_full: Any, theme: str, background: list[int]
) -> None:
    opened_full.select_option("#layer", "5")
    opened_full.select_option("#head", "2")
    while opened_full.inner_text("#theme") != f"Theme: {theme}":
        opened_full.click("#theme")
    png = saved(opened_full, "#attention-map", "Save as PNG")
    assert png.name == "L5H2_attention_map.png"
    shown = opened_full.evaluate("document.getElementById('attention-map').layout.width")
    assert opened_full.evaluate(COLOURS, b64encode(png.read_bytes()).decode()) == [3 * shown, True, background]
    svg = saved(opened_full, "#magnitude-by-position", "Save as SVG")
    assert svg.name == "L5H2_magnitude_by_position.svg"
    title, *_ = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    assert title.text == "Figure 10. Magnitude along the text, L5H2, query side"


def test_the_buttons_of_a_figure_cover_nothing_of_it(opened_full: Any) -> None:
    for figure in opened_full.eval_on_selector_all(".modebar", "all => all.map(one => one.closest('.figure').id)"):
        ends = opened_full.evaluate(
            """id => [document.querySelector(`#${id} .modebar`).getBoundingClientRect().bottom,
                      document.querySelector(`#${id} .main-svg`).getBoundingClientRect().top]""",
            figure,
        )
        assert ends[0] <= ends[1] + 1, figure


def test_the_keys_of_a_chosen_query_are_listed_below(opened: Any, view: ScoreView) -> None:
    lists = [f"#{stage} .attnmech-list" for stage in ("sentence-view", "token-graph")]
    assert all(opened.locator(each).bounding_box() is None for each in lists)
    opened.click(".token >> nth=5")
    row = view.pattern[0, 0, 5]
    for each, least in zip(lists, (0.02, 0.1), strict=True):
        said = opened.inner_text(each).replace("\u2068", "").replace("\u2069", "")
        keys = [key for key in np.argsort(-row) if row[key] >= least]
        weights = [f"{100 * row[key]:.1f}\u00a0% to {key} “{visible_token(TOKENS[key])}”" for key in keys]
        assert said == f"Query 5 “{visible_token(TOKENS[5])}”: {', '.join(weights)}."


def test_back_goes_to_the_choice_before(opened: Any) -> None:
    def pinned() -> int:
        return int(opened.locator(".attnmech-sentence-query button[aria-pressed='true']").count())

    before = opened.evaluate("history.length")
    opened.select_option("#head", "2")
    opened.click(".token >> nth=3")
    drawn = traces(opened, "attention-map")
    for _ in range(3):  # one step for Back
        opened.click("[data-control='rank'][data-step='1']")
    assert opened.evaluate("history.length") == before + 3
    assert opened.evaluate("location.hash") == "#layer=2&head=2&rank=3&query=3"
    opened.evaluate("history.back()")
    opened.wait_for_url("**#layer=2&head=2&rank=0&query=3")
    assert (opened.input_value("#rank"), pinned()) == ("0", 1)
    assert traces(opened, "attention-map") == drawn
    opened.evaluate("history.back()")
    opened.wait_for_url("**#layer=2&head=2&rank=0&query=6")
    opened.wait_for_function("document.querySelectorAll('#sentence-view [aria-pressed=true]').length === 0")
    opened.evaluate("history.back()")
    opened.wait_for_url("**#layer=2&head=0&rank=0&query=6")
    opened.wait_for_function("document.getElementById('head').value === '0'")
    opened.evaluate("history.forward()")
    opened.wait_for_url("**#layer=2&head=2&rank=0&query=6")
    assert opened.evaluate("history.length") == before + 3


def test_sentences_name_heads_quote_tokens_and_write_minus_in_one_way(opened_full: Any) -> None:
    opened_full.select_option("#head", "1")
    opened_full.click(".token >> nth=5")
    for name in ("mean of the heads", "one head"):
        opened_full.locator("#sentence-view select").select_option(name)
    shown = opened_full.eval_on_selector_all(
        ".finding, .lead, .brief, .attnmech-finding, .gtitle, #reason",
        "all => all.map(one => one.textContent).join(' ')",
    )
    assert not re.search(r"[Hh]ead \d|layer \d, head|(?<![\w.])-\d|[‘’]", shown), shown
    assert "L2H1" in shown and "−" in shown and "“" in shown


def test_a_sentence_that_is_left_out_leaves_no_gap(opened: Any) -> None:
    assert opened.inner_text("#reason") == ""
    assert opened.locator("#reason").bounding_box() is None


def test_the_views_follow_the_chosen_query_back_to_the_first_one(opened: Any) -> None:
    """The page begins with query 6; the views pin no row before a reader chooses one."""

    def pinned() -> list[str]:
        read = "all => all.filter(one => one.ariaPressed === 'true').map(one => one.textContent)"
        return list(opened.eval_on_selector_all(".attnmech-sentence-query button", read))

    assert pinned() == []
    opened.click(".token >> nth=3")
    assert [text[0] for text in pinned()] == ["3"]
    opened.click(".token >> nth=6")
    assert [text[0] for text in pinned()] == ["6"]
    opened.keyboard.press("Escape")
    opened.click(".attnmech-sentence-query button >> nth=6")
    assert pinned() == []
    opened.select_option("#head", "2")
    assert pinned() == []


def test_an_address_out_of_range_is_ignored(opened: Any) -> None:
    opened.evaluate("location.hash = '#layer=99&head=-1&rank=x&query=1&owned=1'")
    opened.wait_for_url("**#layer=2&head=0&rank=0&query=1")


def test_tokens_are_chosen_by_keyboard_and_the_frame_follows(opened: Any) -> None:
    opened.focus('.token[aria-pressed="true"]')
    opened.keyboard.press("Home")
    assert opened.get_attribute(".token >> nth=0", "data-mark") == "self"
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    for figure in ("attention-map", "share-bars"):
        frame = opened.evaluate("id => document.getElementById(id).layout.shapes[0]", figure)
        assert (frame["y0"], frame["y1"]) == (0.5, 1.5)


def test_a_click_on_a_row_of_the_map_chooses_it(opened: Any) -> None:
    cells = opened.locator("#attention-map .nsewdrag")
    size = cells.bounding_box()
    second_row = {"x": size["width"] / 10, "y": size["height"] * 2.5 / 7}
    cells.hover(position=second_row)
    opened.wait_for_selector("#attention-map .hovertext")
    cells.click(position=second_row)
    opened.wait_for_url("**&query=2", timeout=5000)


def test_chips_are_shaded_by_the_row_pointed_at(opened: Any, view: ScoreView) -> None:
    def depths() -> list[float]:
        read = "chips => chips.map(chip => Number(chip.style.getPropertyValue('--depth')))"
        return list(opened.eval_on_selector_all(".token", read))

    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 6]).tolist(), abs=5e-3)
    opened.hover(".token >> nth=3")
    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 3]).tolist(), abs=5e-3)
    opened.hover("h1")
    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 6]).tolist(), abs=5e-3)


def test_hostile_text_is_shown_and_does_not_run(opened: Any, view: ScoreView) -> None:
    assert opened.locator(".token").all_inner_texts() == [visible_token(token) for token in view.tokens]
    labels = opened.locator("#share-bars .ytick text").all_text_contents()
    assert '2 <a·href="java…' in labels
    assert "4 ⏎$x$" in labels
    assert "5 ·&amp;" in labels
    opened.hover("#attention-map .nsewdrag")
    assert opened.locator("svg a, header img, main img").count() == 0
    assert opened.evaluate("window.owned") is None


def test_the_call_names_the_figure_and_the_choice(opened: Any) -> None:
    opened.select_option("#layer", "5")
    calls = opened.locator("[data-call]").all_inner_texts()
    assert calls[0] == 'scores.plot("attention_map", layer=5, head=0, rank=0)  # </script>'
    assert calls[1:4] == [
        'scores.plot("row_ledger", query=6)',
        'acts.show("pattern", view="sentence")',
        'acts.show("pattern", view="token_graph")',
    ]


def test_sentences_count_the_rows(opened: Any, view: ScoreView) -> None:
    keys = view.ranked_key[0, 0, 1:, 0]
    is_self = keys == np.arange(1, 7)
    first = (keys == 0).sum()
    sentence = opened.inner_text("#attention-map-finding")
    assert sentence.startswith(
        f"Of the 6 rows with a choice, {is_self.sum()} score highest at the token itself, {first} "
    )
    position_0, rows = "Mean share at rank 0 over 6 rows", view.ranked_share["key_bias"][0, 0, 1:, 0]
    assert opened.inner_text("#score-shares-finding").startswith(f"{position_0}: key bias {100 * rows.mean():.1f}")


def test_the_theme_button_goes_through_light_and_dark(opened: Any) -> None:
    def ink() -> str:
        return str(opened.evaluate("document.getElementById('key-terms').layout.font.color"))

    opened.click("#theme")
    assert opened.inner_text("#theme") == "Theme: light"
    light = ink()
    opened.click("#theme")
    assert opened.inner_text("#theme") == "Theme: dark"
    assert ink() != light


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 16000})
    opened.evaluate("() => new Promise(requestAnimationFrame)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert widths_beyond(opened) == [0] * 5


def widths_beyond(page: Any) -> list[float]:
    """By how much each plotly figure is wider than its place."""
    beyond = "all => all.filter(one => one.layout).map(one => one.layout.width - one.clientWidth)"
    return list(page.eval_on_selector_all(".figure", beyond))


FOCUS_FIGURES = ("self-focus", "first-focus", "concentration")
UPDATE_FIGURES = ("magnitude", "orientation", "orientation-by-magnitude", "magnitude-by-position")


def looks(page: Any, figure: str) -> list[tuple[Any, ...]]:
    """Per trace, what sets a head apart and what the numbers' axes are."""
    drawn = page.evaluate(
        """id => document.getElementById(id).data.map(({meta, opacity, customdata}) => [meta, opacity, customdata])""",
        figure,
    )
    return [(meta, opacity, len(customdata or [])) for meta, opacity, customdata in drawn]


@pytest.mark.parametrize(
    ("layer", "head", "side"), [(0, 0, "query"), (0, 1, "query"), (1, 2, "query"), (1, 1, "target")]
)
def test_the_page_draws_the_updates_that_python_draws(
    opened_full: Any, view: ScoreView, updates: UpdateView, layer: int, head: int, side: Any
) -> None:
    opened_full.select_option("#layer", str(view.layers[layer]))
    opened_full.select_option("#head", str(head))
    opened_full.select_option("#side", side)
    index = updates.layers.index(view.layers[layer])
    magnitude, orientation = updates.magnitude_of(side)[index], updates.orientation_of(side)[index]
    attended = updates.attended[index]
    figures = {
        "magnitude": magnitude_histograms(magnitude, side=side, head=head),
        "orientation": orientation_histograms(orientation, side=side, head=head),
        "orientation-by-magnitude": orientation_by_magnitude(
            magnitude, orientation, attended, updates.tokens, side=side, head=head
        ),
        "magnitude-by-position": magnitude_by_position(magnitude, attended, updates.tokens, side=side, head=head),
    }
    for name, figure in figures.items():
        drawn = traces(opened_full, name)
        for trace in figure.data:
            assert_same_points(drawn[trace.meta], trace)
        assert [(meta, opacity) for meta, opacity, _ in looks(opened_full, name)] == [
            (trace.meta, trace.opacity) for trace in figure.data
        ]
        for axis in ("xaxis", "yaxis"):
            title = opened_full.evaluate(f"document.getElementById('{name}').layout.{axis}.title.text")
            assert title == figure.layout[axis].title.text


def assert_same_points(drawn: dict[str, Any], trace: Any) -> None:
    for name in ("x", "y"):
        shown, expected = np.array(drawn[name], dtype=float), np.array(trace[name], dtype=float)
        np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-4, err_msg=f"{trace.meta}.{name}")
    for shown, expected in zip(drawn["customdata"] or [], trace.customdata or [], strict=True):
        named = isinstance(expected[1], str)  # a point's head and words; else a bin's count and edges
        assert list(shown) == (list(expected) if named else pytest.approx(list(expected)))


def test_the_page_draws_the_focus_that_python_draws(opened_full: Any, focus: FocusView) -> None:
    opened_full.select_option("#layer", "5")
    opened_full.select_option("#head", "2")
    for name, draw in zip(FOCUS_FIGURES, (self_focus, first_focus, concentration), strict=True):
        drawn = traces(opened_full, name)
        figure = draw(focus, chosen=(5, 2))
        assert list(drawn) == [trace.meta for trace in figure.data]
        for trace in figure.data:
            assert drawn[trace.meta]["x"] == list(trace.x)
            shown = np.array(drawn[trace.meta]["y"], dtype=float)
            np.testing.assert_allclose(shown, np.array(trace.y, dtype=float), atol=1e-4)


def test_what_changes_follows_the_choice_and_nothing_else(opened_full: Any) -> None:
    def state() -> dict[str, Any]:
        return {name: traces(opened_full, name) for name in (*FOCUS_FIGURES, *UPDATE_FIGURES)}

    before = state()
    opened_full.click('[data-control="rank"][data-step="1"]')
    opened_full.click(".token >> nth=1")
    assert state() == before
    opened_full.select_option("#side", "target")
    after_side = state()
    assert {name for name in before if after_side[name] != before[name]} == set(UPDATE_FIGURES)
    opened_full.select_option("#layer", "5")
    after_layer = state()
    assert all(after_layer[name] != after_side[name] for name in before)
    opened_full.select_option("#head", "2")
    moved = {name for name, figure in state().items() if figure != after_layer[name]}
    assert moved == {*FOCUS_FIGURES, "orientation-by-magnitude", "magnitude-by-position"}
    assert [opacity for _, opacity, _ in looks(opened_full, "magnitude")] == [0.4, 0.4, 1]


def test_the_address_keeps_the_side(opened_full: Any) -> None:
    opened_full.select_option("#side", "target")
    assert opened_full.evaluate("location.hash") == "#layer=2&head=0&rank=0&query=6&side=target"
    drawn = traces(opened_full, "orientation")
    opened_full.reload()
    opened_full.wait_for_selector("html[data-whole]", state="attached")
    assert opened_full.input_value("#side") == "target"
    assert traces(opened_full, "orientation") == drawn
    opened_full.evaluate("location.hash = '#side=both'")
    opened_full.wait_for_url("**&side=target")


def test_a_page_without_updates_has_no_side(opened: Any) -> None:
    assert not opened.is_visible("#side")
    assert opened.evaluate("location.hash") == "#layer=2&head=0&rank=0&query=6"


def test_axes_of_magnitude_stay_the_same_from_layer_to_layer(opened_full: Any) -> None:
    def range_of_magnitude() -> list[float]:
        return list(opened_full.evaluate("document.getElementById('magnitude').layout.xaxis.range"))

    before = range_of_magnitude()
    opened_full.select_option("#layer", "5")
    assert range_of_magnitude() == before
    opened_full.select_option("#side", "target")
    assert range_of_magnitude() != before


def test_a_click_on_a_head_chooses_it_where_the_page_has_its_layer(opened_full: Any) -> None:
    def click(layer: int, rank: int) -> int:
        """A click on the point of this rank; returns its head."""
        place = opened_full.evaluate(
            """([layer, rank]) => {
                 const {_fullLayout: {xaxis, yaxis}, data} = document.getElementById("concentration");
                 const [trace, index] = [data[rank], data[rank].x.indexOf(layer)];
                 return {head: trace.customdata[index][0], x: xaxis.l2p(layer), y: yaxis.l2p(trace.y[index])};
               }""",
            [layer, rank],
        )
        plot, position = opened_full.locator("#concentration .nsewdrag"), {"x": place["x"], "y": place["y"]}
        plot.hover(position=position)
        opened_full.wait_for_selector("#concentration .hovertext")
        plot.click(position=position)
        return int(place["head"])

    opened_full.select_option("#layer", "5")
    head = click(2, rank=2)
    opened_full.wait_for_url(f"**#layer=2&head={head}&**", timeout=5000)
    assert click(7, rank=0) != head
    assert f"#layer=2&head={head}&" in opened_full.url


def test_sentences_tell_the_chosen_heads_numbers(opened_full: Any, focus: FocusView, updates: UpdateView) -> None:
    opened_full.select_option("#layer", "5")
    first, own, before = ((one >= 0.5).sum() for one in (focus.first_top, focus.self_top, focus.previous_top))
    assert opened_full.inner_text("#all-heads-finding") == (
        f"Of 12 heads, in at least half of their rows {first} look most at the first token, {own} at the token itself, "
        f"{before} at the one before. Chosen: L5H0."
    )
    before = 100 * focus.previous_top[2, 0]
    assert opened_full.inner_text("#self-focus-finding").startswith(
        "L5H0: 0.0\u00a0%. Highest: 100.0\u00a0%, L5H2. "
        "5 of 11 heads look at the token itself in at least half of the rows."
    )
    assert opened_full.inner_text("#self-focus-finding").endswith(f"previous token in {before:.1f}\u00a0%.")
    opened_full.select_option("#head", "1")
    assert opened_full.inner_text("#self-focus-finding").startswith("L5H1: undefined. ")
    magnitude = updates.magnitude[2, 1]
    median = float(f"{np.nanmedian(magnitude[magnitude > 0]):.2g}")
    assert opened_full.inner_text("#magnitude-finding").startswith(f"L5H1: median {median:g} over 6 tokens, from ")
    against = (updates.orientation[2, 1] < 0).sum()
    assert f"; {against} of 6 updates point against" in opened_full.inner_text("#orientation-finding")
    largest = magnitude.argmax()
    assert opened_full.inner_text("#orientation-by-magnitude-finding").startswith(
        f"L5H1 is largest at token {largest} “"
    )
    counts = {"itself": 0, "the first token": 0, "another token": 0}
    for head in range(3):
        for query, key in enumerate(updates.attended[2, head]):
            if key >= 0 and updates.magnitude[2, head, query] > 0:
                counts["itself" if key == query else "the first token" if key == 0 else "another token"] += 1
    sentence = opened_full.inner_text("#magnitude-by-position-finding")
    assert all(f"at {mark} ({count})" in sentence for mark, count in counts.items() if count)


def test_hover_boxes_show_hostile_tokens_as_text(opened_full: Any) -> None:
    place = opened_full.evaluate(
        """() => {
             const {_fullLayout: {xaxis, yaxis}, data} = document.getElementById("magnitude-by-position");
             const trace = data.find(({meta, x}) => meta.startsWith("chosen") && x.includes(2));
             return {x: xaxis.d2p(2), y: yaxis.d2p(trace.y[trace.x.indexOf(2)])};
           }"""
    )
    opened_full.locator("#magnitude-by-position .nsewdrag").hover(position=place)
    box = opened_full.wait_for_selector("#magnitude-by-position .hovertext")
    assert 'query 2 <a·href="java…' in box.text_content()
    assert opened_full.locator("svg a").count() == 0
    assert opened_full.evaluate("window.owned") is None


def test_the_calls_of_figures_4_to_10_name_figure_layer_and_side(opened_full: Any) -> None:
    opened_full.select_option("#layer", "5")
    opened_full.select_option("#side", "target")
    assert opened_full.locator("[data-call]").all_inner_texts()[6:] == [
        *(f'focus.plot("{name}", layer=5)' for name in ("self_focus", "first_focus", "concentration")),
        *(
            f'updates.plot("{name}", layer=5, side="target")  # </script>'
            for name in ("magnitude", "orientation", "orientation_by_magnitude", "magnitude_by_position")
        ),
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_no_figure_of_the_full_page_is_wider_than_the_screen(opened_full: Any, width: int) -> None:
    opened_full.set_viewport_size({"width": width, "height": 16000})
    opened_full.evaluate("() => new Promise(requestAnimationFrame)")
    assert opened_full.evaluate("document.documentElement.scrollWidth") <= width
    assert widths_beyond(opened_full) == [0] * 12
