"""The page of joint embeddings holds its input's numbers, and a browser shows those of the selection."""

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from gzip import decompress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import opening
from unpacking import unpacked

from attnmech.draw.text import visible_token
from attnmech.methods.joint_embedding.page import IN_ADDRESS, embedding_view, mean_apart
from attnmech.methods.joint_embedding.result import JointEmbedding
from attnmech.runs.token_types import TOKEN_TYPES

from .conftest import settle
from .embedding_views import made_images, made_view, page_of
from .token_pages import selector, without

READY = ".attnmech-sentence-box"
SPREAD_SEARCH = "a"
WITHOUT_GL = """
  const original = HTMLCanvasElement.prototype.getContext;
  HTMLCanvasElement.prototype.getContext = function (kind, ...rest) {
    return kind === "webgl2" ? null : original.call(this, kind, ...rest);
  };
"""


def naive_mean_distance(points: np.ndarray) -> float:
    points = points.astype(float)
    apart = [np.sqrt(((points[:one] - points[one]) ** 2).sum(axis=1)) for one in range(len(points))]
    return float(np.concatenate(apart).mean())


# ---- what is carried ----------------------------------------------------------------------------------------------


def test_positions_come_back_within_a_65535th_of_the_range_with_their_mean_distances() -> None:
    """All axes of a head have one scale."""
    view, half = made_view(), len(made_view().labels)
    carried = embedding_view(view).data["projections"]
    assert {name: each["dims"] for name, each in carried.items()} == {"pca": 3, "tsne": 2}
    for name, each in carried.items():
        given = view.points[name].double().numpy()
        back = unpacked(each["points"], given.shape) + np.array(each["centre"])[:, None]
        extent = (given.max(axis=1) - given.min(axis=1)).max(axis=-1)
        assert (np.abs(back - given).max(axis=(1, 2)) <= extent / 65535).all()
        assert (np.abs(back - given).max(axis=(1, 2)) > 0).all()
        np.testing.assert_allclose(each["points"]["low"], -extent / 2)
        np.testing.assert_allclose(each["points"]["step"], extent / 65534)
        apart = [[naive_mean_distance(points[:half]), naive_mean_distance(points[half:])] for points in given]
        np.testing.assert_allclose(each["spread"], apart, rtol=1e-5)


def test_of_many_points_a_thousand_are_compared() -> None:
    points = np.random.default_rng(0).normal(size=(2500, 2))
    assert mean_apart(points) == pytest.approx(naive_mean_distance(points[np.arange(1000) * 5 // 2]), rel=1e-6)
    assert mean_apart(points[:1]) == 0


def test_tokens_norms_and_highest_keys_are_carried() -> None:
    view = made_view()
    data = embedding_view(view).data
    highest = np.nan_to_num(unpacked(data["highest"], (len(view.heads), len(view.labels), 2)), nan=-1)
    np.testing.assert_array_equal(highest, view.highest)
    norms = view.norms.numpy()
    np.testing.assert_allclose(unpacked(data["norms"], norms.shape), norms, atol=np.ptp(norms) / 65535)
    labels = json.loads(decompress(b64decode(data["labels"])))
    assert labels == [visible_token(label) for label in view.labels]
    kinds = unpacked(data["class"], (len(view.labels),))
    assert [data["classes"][int(kind)] for kind in kinds] == [TOKEN_TYPES[kind] for kind in view.types.tolist()]


def test_numbers_and_anomalies_say_what_they_mean() -> None:
    view = made_view()
    first = torch.full((len(view.heads),), 0.7, dtype=torch.float64)
    data = embedding_view(replace(view, numbers={**view.numbers, "first_attention": first})).data
    assert "before projection" in data["meanings"]["correlation"]
    assert "after projection" in data["meanings"]["correlation (PCA)"]
    assert data["meanings"]["attention to first token"] == "mean over all other rows"
    assert "first token" in data["meanings"]["attends to first"]


# ---- in a browser -------------------------------------------------------------------------------------------------


@contextmanager
def shown(chromium: Any, view: JointEmbedding, tmp_path: Path, **given: Any) -> Iterator[Any]:
    with opening(chromium, page_of(view), tmp_path / "page.html", **{"ready": READY} | given) as page:
        page.set_default_timeout(5000)
        yield page
        assert page.evaluate("window.owned") is None


@pytest.fixture(scope="module")
def visit(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with shown(chromium, made_view(), tmp_path_factory.mktemp("page")) as page:
        yield page


@pytest.fixture
def opened(visit: Any) -> Any:
    """The page of `made_view`, shared by tests that change only its choice."""
    visit.mouse.move(0, 0)
    visit.evaluate("() => { document.activeElement.blur(); location.hash = 'layer=0&head=1'; }")
    settle(visit)
    return visit


def of_page(page: Any, code: str) -> Any:
    """The text of the view's control after drawing."""
    page.wait_for_timeout(300)
    return page.evaluate(f"document.getElementById('embedding').control.{code}")


def said(page: Any) -> str:
    return str(page.inner_text(".attnmech-embedding-said")).replace("\u2068", "").replace("\u2069", "")


def choose(page: Any, label: str, option: str) -> None:
    selector(page.locator("#embedding"), label).first.select_option(option)


def search(page: Any, text: str) -> None:
    page.get_by_label("Search").fill(text)
    page.wait_for_function("wanted => location.hash.includes('search=' + wanted)", arg=text)


@pytest.mark.browser
def test_points_stand_where_their_coordinates_say(opened: Any) -> None:
    choose(opened, "Projection", "t-SNE")
    choose(opened, "Layer", "1")
    choose(opened, "Head", "2")
    about = of_page(opened, "plot.about()")
    given = made_view().points["tsne"][4 + 2].double().numpy()
    middle = (given.max(axis=0) + given.min(axis=0)) / 2
    scale = 0.92 * min(about["width"], about["height"]) / np.ptp(given, axis=0).max()
    where = np.array(about["where"]).reshape(-1, 3)[:, :2]
    expected = np.array([about["width"], about["height"]]) / 2 + (given - middle) * scale * [1, -1]
    np.testing.assert_allclose(where, expected, atol=0.05)


@pytest.mark.browser
def test_turning_keeps_distances_in_three_dimensions(opened: Any) -> None:
    given = made_view().points["pca"][of_page(opened, "state().block")].double().numpy()
    distances = np.linalg.norm(given[:, None] - given[None], axis=-1)
    for _ in range(2):
        about = of_page(opened, "plot.about()")
        where = np.array(about["where"]).reshape(-1, 3)
        scale = 0.68 * min(about["width"], about["height"]) / 2  # pixels of 1, like the third column
        where[:, 2] *= scale
        drawn = np.linalg.norm(where[:, None] - where[None], axis=-1)
        np.testing.assert_allclose(drawn, distances * 2 * scale / np.ptp(given, axis=0).max(), atol=0.1)
        opened.locator(".attnmech-embedding-plot").press("ArrowRight")
        opened.locator(".attnmech-embedding-plot").press("ArrowDown")


@pytest.mark.browser
@pytest.mark.parametrize("gl", [True, False])
def test_small_plots_show_each_head_where_its_points_are(chromium: Any, tmp_path: Path, gl: bool) -> None:
    """Every point of every head is drawn at its place."""
    view = made_view(hostile=False)
    path = tmp_path / "page.html"
    html = page_of(view)
    if not gl:
        html = html.replace("<head>", f"<head><script>{WITHOUT_GL}</script>", 1)
    with opening(chromium, html, path, ready=READY) as page:
        about = of_page(page, "matrix.about()")
        assert about["webgl"] is gl
        assert ("lacks WebGL2" in page.inner_text(".attnmech-embedding-panes")) is not gl
        assert len(about["slots"]) == len(view.heads)
        places = []
        for slot in about["slots"]:
            given = view.points["pca"][slot["block"]].double().numpy()
            middle = (given.max(axis=0) + given.min(axis=0))[:2] / 2
            share = 0.5 + (given[:, :2] - middle) / np.ptp(given, axis=0).max()
            corner = 0.04 + 0.92 * np.stack([share[:, 0], 1 - share[:, 1]], axis=1)
            places.append(np.array([slot["x"], slot["y"]]) + about["side"] * corner)
        inked = page.evaluate(
            """places => {
                 const canvas = document.querySelector(".attnmech-embedding-plots");
                 const copy = document.createElement("canvas");
                 Object.assign(copy, { width: canvas.width, height: canvas.height });
                 const drawn = copy.getContext("2d");
                 drawn.drawImage(canvas, 0, 0);
                 return places.filter(([x, y]) => y < copy.height - 2).map(([x, y]) =>
                   drawn.getImageData(x - 1, y - 1, 3, 3).data.some((value, at) => at % 4 === 3 && value > 0));
               }""",
            np.concatenate(places).astype(int).tolist(),
        )
        assert len(inked) > 200 and all(inked)


@pytest.mark.browser
def test_a_search_sorts_heads_by_the_spread_of_its_hits(opened: Any) -> None:
    view = made_view()
    search(opened, "the")
    assert of_page(opened, "hits()") == [index for index, label in enumerate(view.labels) if "the" in label]
    opened.get_by_label("whole token").check()
    assert of_page(opened, "hits()") == [index for index, label in enumerate(view.labels) if label == " the"]
    opened.get_by_label("whole token").uncheck()
    search(opened, SPREAD_SEARCH)
    opened.get_by_label("sort heads by the distance between hits").check()
    hits = [index for index, label in enumerate(view.labels) if SPREAD_SEARCH in visible_token(label).lower()]
    assert len(hits) > 2
    assert of_page(opened, "hits()") == hits
    half = len(view.labels)
    expected = []
    for points in view.points["pca"].numpy():
        kinds = [points[:half], points[half:]]
        expected.append(np.mean([naive_mean_distance(each[hits]) / naive_mean_distance(each) for each in kinds]))
    np.testing.assert_allclose(of_page(opened, "spread()"), expected, rtol=2e-3)
    order = [slot["block"] for slot in of_page(opened, "matrix.about()")["slots"]]
    assert order == np.argsort(expected, kind="stable").tolist()
    layer, head = view.heads[order[0]]
    captions = opened.locator(".attnmech-embedding-cells button span").all_inner_texts()
    assert captions[order[0]] == f"L{layer}H{head} {expected[order[0]]:.2f}"
    found = opened.inner_text(".attnmech-embedding > .attnmech-finding")
    assert f"{len(hits)} tokens of 21. Closest together in L{layer}H{head} ({min(expected):.2f})" in found


@pytest.mark.browser
def test_a_search_looks_in_the_characters_of_tokens(chromium: Any, tmp_path: Path) -> None:
    view = made_view()
    labels = ["\x00", "<b>", " x00", "\u202e", "\\xff", "u003c", *view.labels[6:]]
    labels[6:13] = ["5\u00a0kg", "e\u0301te\u0301", "\u200cها", "col·lega", " \\x41", "你[1,2/3]", "de\u00ads"]
    found = {
        "u003c": [5], "x00": [2], "000": [], "202e": [], "ff": [], "<": [1], "⟨0000": [0], "⟨202e⟩": [3], "\\xff": [4],
        "5\u00a0kg": [6], "\u00e9t\u00e9": [7], "ها": [8], "l·l": [9], "l l": [], "·\\x41": [10],
        "你": [11], "1,2": [], "00a0": [], "de\u00ads": [12],
    }  # fmt: skip
    with shown(chromium, replace(view, labels=tuple(labels)), tmp_path) as page:
        for wanted, hits in found.items():
            page.evaluate("wanted => { location.hash = 'search=' + encodeURIComponent(wanted); }", wanted)
            settle(page)
            got = page.evaluate("document.getElementById('embedding').control.hits()")
            assert [index for index in got or [] if index < 13] == hits, wanted
            sentence = page.inner_text(".attnmech-embedding > .attnmech-finding")
            assert (got is None) == sentence.startswith("No token matches"), "a search without a hit dims nothing"


@pytest.mark.browser
def test_a_point_says_its_attention(opened: Any) -> None:
    view = made_view()
    choose(opened, "Layer", "2")
    choose(opened, "Head", "1")
    block = 2 * 4 + 1
    start, query = 7, 5  # the second text
    choose(opened, "Point", "query")
    opened.get_by_label("token of the point").fill(str(start + query))
    opened.get_by_label("token of the point").press("Enter")
    row = view.patterns["1"][block, query].double().numpy()
    best, second, *_ = np.argsort(-row)
    about = of_page(opened, "plot.about()")
    assert about["whole"]
    drawn = {line["key"] - start: line["weight"] for line in about["lines"]}
    assert drawn == pytest.approx({key: row[key] for key in range(query + 1)}, rel=1e-3)
    assert said(opened).startswith(f"Query 5 “{visible_token(view.labels[start + query])}” of text 1 gives ")
    words = (
        f"{100 * row[best]:.1f}\u00a0% to {best} “{visible_token(view.labels[start + best])}”, {100 * row[second]:.1f}"
    )
    assert words in said(opened)
    choose(opened, "Point", "key")
    column = view.patterns["1"][block, :, query].double().numpy()
    drawn = {line["query"] - start: line["weight"] for line in of_page(opened, "plot.about()")["lines"]}
    assert drawn == pytest.approx({other: column[other] for other in range(query, 9)}, rel=1e-3)
    assert said(opened).startswith(f"Key 5 “{visible_token(view.labels[start + query])}” of text 1 receives ")
    choose(opened, "Point", "query")
    assert of_page(opened, "state().text") == 1  # its sentence is shown, with the token selected
    chosen = opened.locator(".attnmech-sentence-query [aria-pressed='true']")
    assert chosen.inner_text().endswith(visible_token(view.labels[start + query]))


@pytest.mark.browser
def test_of_a_text_that_is_not_carried_the_two_highest_keys_are_said(opened: Any) -> None:
    view = made_view()
    start, query = 16, 3  # the third text
    opened.evaluate(f"location.hash = 'layer=0&head=2&point={start + query}'")
    about = of_page(opened, "plot.about()")
    assert not about["whole"]
    expected = {(int(view.highest[2, 19, rank]), round(float(view.weights[2, 19, rank]), 3)) for rank in range(2)}
    assert {(line["key"], round(line["weight"], 3)) for line in about["lines"]} == expected
    assert "the page stores only the two highest keys of each query" in said(opened)
    key = int(view.highest[2, 19, 0])
    opened.evaluate(f"location.hash = 'layer=0&head=2&point={21 + key}'")
    about = of_page(opened, "plot.about()")
    assert {line["query"] for line in about["lines"]} == set(np.argwhere(view.highest[2].numpy() == key)[:, 0].tolist())


@pytest.mark.browser
def test_attention_to_a_token_that_is_no_dot_is_said(chromium: Any, tmp_path: Path) -> None:
    """Token 0 of the first text was not sampled."""
    view = made_view()
    points = np.r_[1:21, 22:42]
    fewer: dict[str, Any] = {
        name: getattr(view, name)[1:] for name in ("labels", "text", "position", "special", "types")
    }
    fewer |= {"highest": (view.highest[:, 1:] - 1).clamp_min(-1), "weights": view.weights[:, 1:]}
    fewer |= {"norms": view.norms[:, points], "points": {name: on[:, points] for name, on in view.points.items()}}
    with shown(chromium, replace(view, **fewer), tmp_path, address="#layer=0&head=0&point=1") as page:
        row = view.patterns["0"][0, 2].double().numpy()
        first = f"{100 * row[0]:.1f}\u00a0% to 0 “<s>” (not plotted)"
        assert first in said(page)
        drawn = {line["key"]: line["weight"] for line in of_page(page, "plot.about()")["lines"]}
        assert drawn == pytest.approx({0: row[1], 1: row[2]}, rel=1e-3)


@pytest.mark.browser
def test_a_click_on_a_dot_and_on_a_token_choose_the_same(opened: Any) -> None:
    opened.evaluate("location.hash = 'layer=1&head=1&projection=tsne'")
    about = of_page(opened, "plot.about()")
    where = np.array(about["where"]).reshape(-1, 3)[:, :2]
    gaps = np.linalg.norm(where[:, None] - where[None], axis=-1) + 1e6 * np.eye(len(where))
    lonely = int(np.argmax(gaps.min(axis=1)[: 7 + 9]))  # a query of a text that the page contains
    opened.locator(".attnmech-embedding-plot").click(
        position={"x": float(where[lonely, 0]), "y": float(where[lonely, 1])}
    )
    assert of_page(opened, "state().point") == lonely
    opened.locator(".attnmech-sentence-key button").nth(2).click()
    text = of_page(opened, "state().text")
    assert of_page(opened, "state().point") == 21 + [0, 7][text] + 2
    opened.locator(".attnmech-sentence-key button").nth(2).click()
    assert of_page(opened, "state().point") == -1


@pytest.mark.browser
@pytest.mark.parametrize("precision", [torch.float16, torch.float32])
def test_hiding_the_first_token_computes_the_softmax_again(chromium: Any, tmp_path: Path, precision: Any) -> None:
    view = made_view(precision=precision)
    patterns = view.patterns["0"]
    patterns[1, 4] = 0
    patterns[1, 4, :3] = torch.tensor([1 - 3e-7, 2e-7, 1e-7])  # float16 keeps one digit of these
    with shown(
        chromium, replace(view, patterns={"0": patterns}), tmp_path, address="#layer=0&head=1&hideFirst=true"
    ) as page:
        found = page.evaluate("document.querySelector('.attnmech-sentence').parentElement !== null")
        assert found
        weights = np.array(of_page(page, "sentence().weights()"), dtype=float)[0]
        expected = without(patterns[1].double().numpy(), [0])
        if precision is torch.float16:
            expected[4] = np.nan
        np.testing.assert_allclose(weights, expected, rtol=2e-3)
        blank = page.locator(".attnmech-sentence-query .attnmech-sentence-blank").count()
        assert blank == (2 if precision is torch.float16 else 1)
        assert "No key remains for query 0" in page.inner_text(".attnmech-sentence .attnmech-finding")


@pytest.mark.browser
def test_heads_that_were_left_out_have_no_plot_and_no_part_in_the_mean(chromium: Any, tmp_path: Path) -> None:
    view = made_view(missing=[(1, 0), (1, 3)])
    with shown(chromium, view, tmp_path, address="#layer=1&head=2&mode=2") as page:
        assert len(of_page(page, "matrix.about()")["slots"]) == 10
        weights = np.array(of_page(page, "sentence().weights()"), dtype=float)[0]
        np.testing.assert_allclose(weights, view.patterns["0"][[4, 5]].mean(dim=0), rtol=1e-3)
        choose(page, "Head", "3")
        assert of_page(page, "state().block") == 4  # the layer's first


@pytest.mark.browser
def test_the_address_says_the_choice_and_back_undoes_it(opened: Any) -> None:
    opened.wait_for_timeout(700)  # steps in quick succession are one step of Back
    usual = of_page(opened, "state()")
    choose(opened, "Colour", "token type")
    choose(opened, "Layer", "2")
    opened.get_by_label("hide the first token").check()
    search(opened, "dog")
    opened.get_by_label("labels").check()
    chosen = of_page(opened, "state()")
    assert chosen == usual | {"pointColour": "class", "block": 9, "search": "dog", "labels": True}
    address = opened.evaluate("location.hash")
    assert address == "#layer=2&head=1&pointColour=class&search=dog&labels=true&hideFirst=true"
    for key in ("labels", "search"):
        opened.go_back()
        chosen[key] = usual[key]
        assert of_page(opened, "state()") == chosen
    opened.goto("about:blank")
    opened.go_back()
    opened.wait_for_selector(READY)
    assert of_page(opened, "state()") == chosen
    assert opened.get_by_label("hide the first token").is_checked()


@pytest.mark.browser
def test_the_map_of_heads_and_the_small_plots_choose_the_same_head(opened: Any) -> None:
    opened.get_by_label("labels").check()
    opened.wait_for_timeout(700)  # steps in quick succession are one step of Back
    opened.locator(".heads-cell").nth(6).click()
    assert of_page(opened, "state().block") == 6 and opened.inner_text("#head-name") == "L1H2"
    opened.wait_for_timeout(700)
    opened.locator(".attnmech-embedding-cells button").nth(9).click()
    assert opened.inner_text("#head-name") == "L2H1"
    assert opened.locator(".heads-cell[aria-selected=true]").get_attribute("aria-label").startswith("L2H1")
    assert opened.evaluate("location.hash") == "#layer=2&head=1&labels=true"
    opened.go_back()
    state = of_page(opened, "state()")
    assert state["block"] == 6 and state["labels"] and opened.inner_text("#head-name") == "L1H2"
    assert {*state} - {"block"} <= {*IN_ADDRESS}


@pytest.mark.browser
def test_a_wrong_address_falls_back_to_what_is_usual(chromium: Any, tmp_path: Path) -> None:
    address = "#layer=99&head=1&projection=</script>&pointColour=__proto__&point=1e9&text=7&size=-3&show=x&labels=maybe"
    with shown(chromium, made_view(), tmp_path, address=address) as page:
        state = of_page(page, "state()")
        assert (state["projection"], state["pointColour"], state["point"], state["show"]) == ("pca", "kind", -1, "both")
        assert (state["block"], state["text"], state["size"], state["labels"]) == (1, 0, 1, False)


@pytest.mark.browser
def test_an_anomaly_leads_to_its_head(opened: Any) -> None:
    opened.get_by_role("button", name="L0H3: norm disparity, 8.00").click()
    assert of_page(opened, "state().block") == 3
    assert "L0H3: 21 tokens (3 texts)" in opened.inner_text(".attnmech-embedding-panes")


@pytest.mark.browser
def test_arrow_keys_go_from_plot_to_plot(opened: Any) -> None:
    opened.locator(".attnmech-embedding-cells [aria-pressed='true']").focus()
    for key, block in (
        ("ArrowRight", 2),
        ("ArrowDown", 6),
        ("ArrowLeft", 5),
        ("End", 11),
        ("ArrowRight", 11),
        ("Home", 0),
    ):
        opened.keyboard.press(key)
        assert of_page(opened, "state().block") == block


@pytest.mark.browser
def test_every_colour_has_a_legend(opened: Any) -> None:
    words = {
        "normalised": "light = start of the text",
        "modulo": "position mod 5",
        "norm": "before scaling: lowest to highest",
        "class": "sentence end",
        "length": "text length, 5 to 9 tokens",
        "head": "previous token",
    }
    for scheme, legend in words.items():
        opened.evaluate(f"location.hash = 'layer=0&head=0&pointColour={scheme}'")
        opened.locator(".attnmech-embedding-legend").filter(has_text=legend).wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["modulo", "class"])
def test_dots_have_the_colours_of_the_legend(opened: Any, scheme: str) -> None:
    view = made_view()
    opened.evaluate(f"location.hash = 'layer=0&head=1&projection=tsne&pointColour={scheme}'")
    where = np.array(of_page(opened, "plot.about()")["where"]).reshape(-1, 3)[:, :2]
    gaps = np.linalg.norm(where[:, None] - where[None], axis=-1) + 1e6 * np.eye(len(where))
    legend = opened.evaluate(
        """() => [...document.querySelectorAll(".attnmech-embedding-legend span:has(i)")].map((each) => {
             const { backgroundColor } = getComputedStyle(each.firstChild);
             return [each.textContent.trim(), backgroundColor.match(/[0-9]+/g).map(Number)];
           })"""
    )
    colours = [colour for _, colour in legend]
    names = [words for words, _ in legend]
    for point in np.flatnonzero(gaps.min(axis=1) > 9).tolist():
        token, is_key = point % len(view.labels), point >= len(view.labels)
        if scheme == "modulo":
            expected = colours[5 * is_key + int(view.position[token]) % 5]
        else:
            expected = colours[names.index(TOKEN_TYPES[view.types[token]])]
        pixel = opened.evaluate(
            """([x, y]) => {
                 const canvas = document.querySelector(".attnmech-embedding-plot");
                 return [...canvas.getContext("2d").getImageData(Math.round(x), Math.round(y), 1, 1).data].slice(0, 3);
               }""",
            where[point].tolist(),
        )
        np.testing.assert_allclose(pixel, expected, atol=3)


@pytest.mark.browser
def test_the_view_fits_a_phone_a_wide_screen_and_paper(chromium: Any, tmp_path: Path) -> None:
    view = made_view(layers=9, heads=12)
    with shown(chromium, view, tmp_path, width=390, height=844, address="#layer=0&head=1&search=dog&point=2") as page:
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 1000, "height": 500})
        page.wait_for_timeout(300)
        assert of_page(page, "plot.about()")["width"] > 390
        page.emulate_media(media="print")
        page.wait_for_timeout(300)
        box = page.locator(".attnmech-embedding-matrix")
        assert box.evaluate("box => box.scrollHeight <= box.clientHeight + 1")
        canvas = box.evaluate("box => box.querySelector('canvas').clientHeight")
        assert canvas >= 9 * of_page(page, "matrix.about()")["side"]


@pytest.mark.browser
def test_patches_show_their_picture_and_colours(chromium: Any, tmp_path: Path) -> None:
    view = made_view(lengths=(21, 21, 21), images=made_images(), hostile=False)
    with shown(chromium, view, tmp_path, address="#layer=0&head=1&point=7&pointColour=row") as page:
        assert "row of the patch" in page.inner_text(".attnmech-embedding-legend")
        assert "Attention of token 7" in page.locator(".attnmech-embedding-section").last.inner_text()
        assert "63 tokens (3 images)" in page.inner_text(".attnmech-embedding-panes")
        where = np.array(of_page(page, "plot.about()")["where"]).reshape(-1, 3)
        last = int(np.argmax(where[:, 0]))  # nothing covers its left edge
        pixels = page.evaluate(
            """([x, y]) => {
                 const canvas = document.querySelector(".attnmech-embedding-plot");
                 const { data } = canvas.getContext("2d").getImageData(Math.round(x), Math.round(y) - 1, 24, 3);
                 return Array.from({ length: 72 }, (_, at) => [...data.subarray(4 * at, 4 * at + 3)]);
               }""",
            where[last, :2].tolist(),
        )
        border = [0, 114, 178] if last < 63 else [213, 94, 0]
        assert np.abs(np.array(pixels) - border).max(axis=1).min() < 15
        picture = page.locator(".attnmech-embedding-picture")
        box = picture.bounding_box()
        picture.click(position={"x": box["width"] * 3.5 / 5, "y": box["height"] * 2.5 / 4})
        assert of_page(page, "state().point") == 1 + 2 * 5 + 3


@pytest.mark.browser
def test_a_notebook_shows_the_same_on_its_own_background(chromium: Any, tmp_path: Path) -> None:
    body = f'<body style="background:#111">{embedding_view(made_view())._repr_html_()}</body>'
    with opening(chromium, body, tmp_path / "cell.html", ready=READY) as page:
        page.wait_for_timeout(300)
        assert page.locator(".attnmech-embedding-cells button").count() == 12
        assert page.locator(".attnmech-embedding").evaluate("each => getComputedStyle(each).colorScheme") == "dark"
        page.locator(".attnmech-embedding-cells button").nth(5).click()
        assert "L1H1: 21 tokens" in page.inner_text(".attnmech-embedding")
        assert page.evaluate("location.hash") == ""
        assert page.evaluate("window.owned") is None
