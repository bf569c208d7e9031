"""The model view holds its input's numbers, and a browser shows those of the selected head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import opening
from draw.conftest import TOKENS
from unpacking import unpacked

from attnmech.draw.all_heads import model_view
from attnmech.draw.embed import View

from .token_pages import random_pattern

LAYERS, HEADS, COUNT = (2, 5, 9), 4, len(TOKENS)


@pytest.fixture(scope="module")
def pattern() -> np.ndarray:
    return random_pattern(len(LAYERS), HEADS, COUNT, COUNT)


# ---- what is carried ----------------------------------------------------------------------------------------------


def test_many_probabilities_take_a_byte_each_and_the_reading_says_so() -> None:
    pattern = random_pattern(2, 3, 590, 600, causal=False)
    view = model_view(pattern, ["q"] * 590, keys=["k"] * 600, layers=[0, 1])
    back = unpacked(view.data["pattern"], pattern.shape)
    assert np.abs(back - pattern).max() < 0.004
    assert np.abs(back - pattern)[pattern < 0.01].max() < 0.0004
    assert "off by at most 0.004, those below 0.01 by at most 0.0004" in view.reading


def test_facts_equal_a_naive_loop(pattern: np.ndarray) -> None:
    pattern = pattern.copy()
    pattern[1, 2, 4] = 0
    pattern[1, 2, 4, [1, 3]] = 0.5  # a tie
    pattern[0, 3, 5] = 0
    pattern[0, 3, 5, 2] = 1  # one head sees only one key where the others see more
    data = model_view(pattern, TOKENS, layers=LAYERS).data
    top = np.nan_to_num(unpacked(data["top"], pattern.shape[:3]), nan=-1)
    assert data["rows"] == COUNT - 1
    for layer in range(len(LAYERS)):
        for head in range(HEADS):
            rows = pattern[layer, head]
            block = layer * HEADS + head
            assert top[layer, head, 0] == -1
            for query in range(1, COUNT):
                best = [key for key in range(COUNT) if rows[query, key] == max(rows[query])]
                assert top[layer, head, query] == (best[0] if len(best) == 1 else -1)
            expected = {
                "first": sum(float(rows[query, 0]) for query in range(1, COUNT)) / (COUNT - 1),
                "self": sum(float(rows[query, query]) for query in range(1, COUNT)) / (COUNT - 1),
                "previous": sum(float(rows[query, query - 1]) for query in range(1, COUNT)) / (COUNT - 1),
            }
            assert {name: means[block] for name, means in data["means"].items()} == pytest.approx(expected, abs=1e-6)
    assert top[1, 2, 4] == -1
    assert top[0, 3, 5] == 2


def test_every_row_of_an_encoder_has_a_choice() -> None:
    pattern = random_pattern(1, 2, 5, 5, causal=False)
    data = model_view(torch.from_numpy(pattern), list("abcde"), layers=[0]).data
    assert data["rows"] == 5
    before = [float(np.diagonal(pattern[0, head], offset=-1).mean()) for head in range(2)]
    assert data["means"]["previous"] == pytest.approx(before, abs=1e-6)


def test_one_token_has_no_choice() -> None:
    data = model_view(np.ones((1, 2, 1, 1)), ["a"], layers=[0]).data
    assert data["rows"] == 0
    assert data["means"] == {"first": [0.0, 0.0], "self": [0.0, 0.0], "previous": [0.0, 0.0]}


# ---- in a browser -------------------------------------------------------------------------------------------------


@contextmanager
def shown(chromium: Any, view: View, tmp_path: Path) -> Iterator[Any]:
    html = view.write_html(tmp_path / "made.html").read_text("utf-8")
    with opening(chromium, html, tmp_path / "page.html") as page:
        page.wait_for_selector(".attnmech-model-map")
        page.evaluate("""() => {
            window.heard = [];
            document.addEventListener("attnmech-choose", ({ detail }) => window.heard.push(detail));
        }""")
        yield page
        assert page.evaluate("window.owned") is None


@pytest.fixture(scope="module")
def visit(chromium: Any, pattern: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with shown(chromium, model_view(pattern, TOKENS, layers=LAYERS), tmp_path_factory.mktemp("page")) as page:
        yield page


@pytest.fixture
def opened(visit: Any) -> Any:
    """The page of `pattern`, shared by tests that change only its choice."""
    visit.mouse.move(0, 0)
    visit.evaluate("document.querySelector('.attnmech').control.choose({layer: 0, head: 0}); heard.length = 0")
    return visit


def small(layer: int, head: int) -> str:
    return f'.attnmech-model-overview [aria-label="layer {layer}, head {head}"]'


def small_opacities(page: Any, layer: int, head: int) -> np.ndarray:
    """The opacity of every pixel of a drawn small map, from 0 to 255."""
    handle = page.wait_for_selector(f"{small(layer, head)} canvas")
    page.wait_for_function("canvas => canvas.width !== 300", arg=handle)
    read = """canvas => [canvas.height, canvas.width, ...canvas.getContext("2d")
        .getImageData(0, 0, canvas.width, canvas.height).data.filter((_, at) => at % 4 === 3)]"""
    height, width, *opacities = handle.evaluate(read)
    return np.array(opacities).reshape(height, width)


def large_pixels(page: Any, queries: int, keys: int) -> np.ndarray:
    """The pixels of the large map, [query key channel], away from its marks and lines."""
    read = """(canvas, [queries, keys]) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const found = [];
        for (let query = 0; query < queries; query += 1) for (let key = 0; key < keys; key += 1) {
            const row = Math.floor((query + 0.25) * canvas.height / queries);
            const at = 4 * (row * canvas.width + Math.floor((key + 0.25) * canvas.width / keys));
            found.push(...data.subarray(at, at + 4));
        }
        return found;
    }"""
    return np.array(page.eval_on_selector(".attnmech-model-map", read, [queries, keys])).reshape(queries, keys, 4)


def assert_large_map_shows(page: Any, expected: np.ndarray) -> None:
    opacities = large_pixels(page, *expected.shape)[..., 3]
    np.testing.assert_allclose(opacities, 255 * np.sqrt(expected), atol=1)


def centre_of(page: Any, query: int, key: int, queries: int, keys: int) -> dict[str, float]:
    box = page.locator(".attnmech-model-map").bounding_box()
    return {"x": box["width"] * (key + 0.5) / keys, "y": box["height"] * (query + 0.5) / queries}


@pytest.mark.browser
def test_every_head_has_its_maps_and_its_sentence(opened: Any, pattern: np.ndarray) -> None:
    rows = np.arange(1, COUNT)
    for row, layer in enumerate(LAYERS):
        for head in range(HEADS):
            np.testing.assert_allclose(small_opacities(opened, layer, head), 255 * np.sqrt(pattern[row, head]), atol=1)
            opened.click(small(layer, head))
            assert_large_map_shows(opened, pattern[row, head])
            top = pattern[row, head, 1:].argmax(axis=-1)
            mean = [100 * pattern[row, head, rows, keys].mean() for keys in (np.zeros_like(rows), rows, rows - 1)]
            assert opened.inner_text(".attnmech-finding").replace("\u00a0", " ") == (
                f"In L{layer}H{head}, the highest weight is on the first token in {(top == 0).sum()} of {COUNT - 1} "
                f"rows with several keys, on the token itself in {(top == rows).sum()} and on the previous one in "
                f"{(top == rows - 1).sum()}; on average these receive {mean[0]:.1f} %, "
                f"{mean[1]:.1f} % and {mean[2]:.1f} % of the attention."
            )


@pytest.mark.browser
def test_clicks_selectors_and_the_page_choose(opened: Any, pattern: np.ndarray) -> None:
    opened.click(small(9, 2))
    opened.click(small(9, 3))
    assert opened.evaluate("heard") == [{"layer": 2, "head": 2}, {"head": 3}]
    assert opened.locator('.attnmech-model-overview [aria-pressed="true"]').count() == 1
    assert opened.get_attribute(small(9, 3), "aria-pressed") == "true"
    opened.locator("select").nth(0).select_option(index=1)
    assert_large_map_shows(opened, pattern[1, 3])
    opened.evaluate("document.querySelector('.attnmech').control.choose({layer: 2, head: 1})")
    assert_large_map_shows(opened, pattern[2, 1])
    assert [opened.locator("select").nth(place).input_value() for place in (0, 1)] == ["9", "1"]
    assert opened.evaluate("heard.slice(2)") == [{"layer": 1}]  # a choice of the page itself triggers no event


@pytest.mark.browser
def test_arrow_keys_move_between_heads_and_stop_at_the_edges(opened: Any, pattern: np.ndarray) -> None:
    opened.focus('.attnmech-model-overview [tabindex="0"]')
    for key, place in (
        ("ArrowLeft", (0, 0)),
        ("ArrowRight", (0, 1)),
        ("ArrowDown", (1, 1)),
        ("End", (1, 3)),
        ("ArrowRight", (1, 3)),
        ("ArrowDown", (2, 3)),
        ("ArrowDown", (2, 3)),
        ("Home", (2, 0)),
        ("ArrowUp", (1, 0)),
    ):
        opened.keyboard.press(key)
        label = f"layer {LAYERS[place[0]]}, head {place[1]}"
        assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == label
        assert opened.locator('.attnmech-model-overview [tabindex="0"]').count() == 1
        assert_large_map_shows(opened, pattern[place])


@pytest.mark.browser
def test_each_row_has_its_maximum_marked_by_where_it_is(opened: Any, pattern: np.ndarray) -> None:
    opened.click(small(5, 1))
    colours = {"self": [0, 158, 115], "first": [154, 95, 214], "other": [213, 94, 0]}
    read = """(canvas, [x, y]) => [...canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3)]"""
    for query in range(1, COUNT):
        key = int(pattern[1, 1, query].argmax())
        mark = "self" if key == query else "first" if key == 0 else "other"
        at = centre_of(opened, query, key, COUNT, COUNT)
        pixel = opened.eval_on_selector(".attnmech-model-map", read, [int(at["x"]), int(at["y"])])
        assert pixel == colours[mark]


@pytest.mark.browser
def test_the_pointer_reads_a_cell_and_a_click_chooses_its_row(opened: Any, pattern: np.ndarray) -> None:
    opened.click(small(2, 3))
    opened.evaluate("heard.length = 0")
    opened.locator(".attnmech-model-map").hover(position=centre_of(opened, 5, 3, COUNT, COUNT))
    lines = opened.locator(".attnmech-box:visible").inner_text().replace("\u00a0", " ").splitlines()
    assert "query 5" in lines[0]
    assert "the" in lines[1]
    assert lines[2].startswith(f"probability {100 * pattern[0, 3, 5, 3]:.1f} %")
    opened.locator(".attnmech-model-map").click(position=centre_of(opened, 5, 3, COUNT, COUNT))
    said = opened.inner_text(".attnmech-model-row").replace("\u00a0", " ")
    top = int(pattern[0, 3, 5].argmax())
    assert said.startswith("Query 5 ")
    assert f" {top} " in said.split("attends to")[1].split("%")[0]
    assert f"{100 * pattern[0, 3, 5, top]:.1f} %" in said
    opened.keyboard.press("ArrowUp")
    assert opened.inner_text(".attnmech-model-row").startswith("Query 4 ")
    assert opened.evaluate("heard") == [{"query": 5}, {"query": 4}]
    opened.locator(".attnmech-model-map").click(position=centre_of(opened, 1, 0, COUNT, COUNT))
    assert "<img" in opened.inner_text(".attnmech-model-row")  # as text
    assert opened.locator(".attnmech img, .attnmech a").count() == 0


@pytest.mark.browser
def test_one_head_enlarged_and_escape_goes_back(opened: Any, pattern: np.ndarray) -> None:
    opened.click(small(5, 2))
    opened.click("text=Enlarge this head")
    assert not opened.is_visible(".attnmech-model-overview")
    assert_large_map_shows(opened, pattern[1, 2])
    opened.keyboard.press("Escape")
    assert opened.is_visible(".attnmech-model-overview")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 5, head 2"
    assert opened.is_visible("text=Enlarge this head")


@pytest.mark.browser
def test_a_dark_page_has_a_light_colour_and_the_same_opacities(opened: Any, pattern: np.ndarray) -> None:
    def brightness() -> list[int]:
        """The green value at a probability of 1, on a small map and on the large one."""
        small_opacities(opened, 2, 0)
        read = 'map => map.getContext("2d").getImageData(0, 0, 1, 1).data[1]'
        of_small = opened.eval_on_selector(f"{small(2, 0)} canvas", read)
        return [of_small, int(large_pixels(opened, COUNT, COUNT)[0, 0, 1])]

    assert brightness() == [0x4A, 0x4A]
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_timeout(100)
    assert brightness() == [0xC1, 0xC1]
    assert_large_map_shows(opened, pattern[0, 0])
    np.testing.assert_allclose(small_opacities(opened, 2, 0), 255 * np.sqrt(pattern[0, 0]), atol=1)
    opened.emulate_media(color_scheme="null")


@pytest.mark.browser
def test_a_phone_scrolls_the_small_maps_and_not_the_page(chromium: Any, tmp_path: Path) -> None:
    pattern = random_pattern(2, 24, 9, 9)
    with shown(chromium, model_view(pattern, list("abcdefghi"), layers=[0, 1]), tmp_path) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.eval_on_selector(".attnmech-model-overview", "box => box.scrollWidth > box.clientWidth")
        page.focus('.attnmech-model-overview [tabindex="0"]')
        page.keyboard.press("End")
        np.testing.assert_allclose(small_opacities(page, 0, 23), 255 * np.sqrt(pattern[0, 23]), atol=1)
        assert_large_map_shows(page, pattern[0, 23])


@pytest.mark.browser
def test_small_maps_are_made_when_they_come_into_view(chromium: Any, tmp_path: Path) -> None:
    pattern = random_pattern(40, 3, 5, 5)
    with shown(chromium, model_view(pattern, list("abcde"), layers=range(40)), tmp_path) as page:
        small_opacities(page, 0, 0)
        page.wait_for_timeout(200)
        blank = "maps => maps.filter(({ width }) => width === 300).length"
        assert page.eval_on_selector_all(".attnmech-model-overview canvas", blank) > 60
        page.eval_on_selector(".attnmech-model-overview", "box => box.scrollTo(0, box.scrollHeight)")
        np.testing.assert_allclose(small_opacities(page, 39, 1), 255 * np.sqrt(pattern[39, 1]), atol=1)


@pytest.mark.browser
def test_a_thin_line_stays_visible_where_a_pixel_stands_for_several_cells(chromium: Any, tmp_path: Path) -> None:
    queries, keys = 300, 410
    pattern = np.zeros((1, 2, queries, keys), dtype=np.float32)
    pattern[..., 0] = 1
    pattern[0, 1, 211, [0, 97]] = [0, 1]
    view = model_view(pattern, ["q"] * queries, keys=["k"] * keys, layers=[0])
    with shown(chromium, view, tmp_path) as page:
        opacities = small_opacities(page, 0, 1)
        height, width = opacities.shape
        assert height < 100
        expected = np.zeros((height, width))
        expected[:, 0] = 255
        expected[211 * height // queries, 97 * width // keys] = 255
        np.testing.assert_array_equal(opacities, expected)
        page.click(small(0, 1))
        position = centre_of(page, 211, 97, queries, keys)
        page.locator(".attnmech-model-map").hover(position=position)
        box = page.locator(".attnmech-box:visible").inner_text()
        assert "query 211" in box
        assert "key 97" in box
        assert "100.0" in box


@pytest.mark.browser
def test_one_layer_wraps_and_the_arrows_follow_the_rows_on_the_screen(chromium: Any, tmp_path: Path) -> None:
    pattern = random_pattern(1, 20, 6, 6)
    with shown(chromium, model_view(pattern, list("abcdef"), layers=[4]), tmp_path) as page:
        tops = page.eval_on_selector_all(".attnmech-model-overview button", "all => all.map(each => each.offsetTop)")
        across = tops.count(tops[0])
        assert 1 < across < 20
        page.focus('.attnmech-model-overview [tabindex="0"]')
        page.keyboard.press("ArrowDown")
        assert_large_map_shows(page, pattern[0, across])
        page.keyboard.press("End")
        assert_large_map_shows(page, pattern[0, 2 * across - 1])


@pytest.mark.browser
def test_right_to_left_and_emoji_tokens_are_isolated(chromium: Any, tmp_path: Path) -> None:
    tokens = ["שלום", " עולם", "🙂", "مرحبا", "e\u0301"]
    with shown(chromium, model_view(random_pattern(2, 2, 5, 5), tokens, layers=[0, 1]), tmp_path) as page:
        shown_tokens = page.locator(".attnmech-model-row bdi").all_inner_texts()
        assert len(shown_tokens) == 6
        assert set(shown_tokens) == {"שלום", "·עולם", "🙂", "مرحبا", "e\u0301"}
        page.locator(".attnmech-model-map").hover(position=centre_of(page, 3, 0, 5, 5))
        assert page.locator(".attnmech-box:visible").inner_text().startswith("query 3 \u2068مرحبا\u2069")


@pytest.mark.browser
def test_cross_attention_has_two_texts_and_no_token_itself(chromium: Any, tmp_path: Path) -> None:
    pattern = random_pattern(2, 3, 4, 6, causal=False)
    keys = ["<b>un</b>", "deux", "trois", "quatre", "cinq", "six"]
    with shown(chromium, model_view(pattern, list("abcd"), keys=keys, layers=[0, 1]), tmp_path) as page:
        page.click(small(1, 2))
        assert_large_map_shows(page, pattern[1, 2])
        count, mean = (pattern[1, 2].argmax(axis=-1) == 0).sum(), 100 * pattern[1, 2, :, 0].mean()
        assert page.inner_text(".attnmech-finding").replace("\u00a0", " ") == (
            f"In L1H2, the highest weight is on the first key token in {count} of 4 rows with several keys; "
            f"on average it receives {mean:.1f} % of the attention."
        )
        assert "itself" not in page.inner_text(".attnmech-model")
        page.locator(".attnmech-model-map").hover(position=centre_of(page, 3, 0, 4, 6))
        assert "key 0 \u2068<b>un</b>\u2069" in page.locator(".attnmech-box:visible").inner_text()


@pytest.mark.browser
def test_inside_another_page_the_overview_says_what_was_chosen(opened: Any) -> None:
    """With `overview` there are only small maps, of the page's patterns; arrows move, Enter selects."""
    opened.evaluate("""async () => {
        const place = document.createElement("div");
        place.className = "attnmech";
        place.id = "inner";
        document.body.prepend(place);
        const pattern = { of: (layer, head) => Float32Array.of(1, 0, layer / 4, 1 - layer / 4) };
        const [layers, queries] = [[3, 4], ["a", "b"]];
        const words = { weight: "probability", whole: "attention", mark: "" };
        const data = { layers, heads: 3, queries, keys: queries, pattern, words, embedded: true, overview: true };
        place.control = await attnmech.views.model(place, { ...data, chosen: { layer: 1, head: 2 } });
    }""")
    assert opened.locator("#inner .attnmech-model-map, #inner select").count() == 0
    cell = '#inner [aria-label="layer 4, head 1"]'
    opened.wait_for_function("canvas => canvas.width === 2", arg=opened.query_selector(f"{cell} canvas"))
    opened.focus('#inner [aria-pressed="true"]')
    opened.keyboard.press("ArrowLeft")
    assert opened.evaluate("heard") == []
    assert opened.get_attribute(cell, "aria-pressed") == "false"
    opened.keyboard.press("Enter")
    assert opened.evaluate("heard") == [{"head": 1}]
    assert opened.get_attribute(cell, "aria-pressed") == "true"
    opened.evaluate("document.querySelector('#inner').control.choose({layer: 0})")
    assert opened.get_attribute('#inner [aria-label="layer 3, head 1"]', "aria-pressed") == "true"
    assert opened.evaluate("heard") == [{"head": 1}]
    opened.evaluate("document.getElementById('inner').remove()")
