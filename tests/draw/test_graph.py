"""The token graph: its input, and, in a real browser, its edges, words and keyboard control."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from unpacking import unpacked

from attnmech.draw.embed import View
from attnmech.draw.graph import token_graph
from attnmech.draw.text import visible_token
from attnmech.errors import InputError

from .conftest import TOKENS
from .token_pages import COUNT, HEADS, LAYERS, causal, choose, finding, random_pattern, selector, weights, without

KEYS = ["שלום", "🙂", "1,2", "<b>x</b>"]


def both_ways(keys: int = COUNT) -> np.ndarray:
    """[layer head query key] without a mask."""
    return random_pattern(LAYERS, HEADS, COUNT, keys, causal=False, seed=3)


def above(pattern: np.ndarray, threshold: float) -> set[tuple[int, int]]:
    return {(query, key) for query, key in np.argwhere(pattern >= threshold).tolist()}


def edges(page: Any) -> set[tuple[int, int]]:
    drawn = page.evaluate(
        """async () => {
             for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
             return document.getElementById('figure-0').control.edges();
           }"""
    )
    assert page.locator(".attnmech-graph svg path").count() == 2 * len(drawn)
    return {(edge["query"], edge["key"]) for edge in drawn}


def set_threshold(page: Any, threshold: float) -> None:
    page.get_by_label("Threshold").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", threshold
    )


def test_the_payload_holds_the_pattern() -> None:
    pattern = both_ways(len(KEYS))
    view = token_graph(pattern, TOKENS, layers=[2, 5], keys=KEYS, threshold=0.3)
    np.testing.assert_allclose(unpacked(view.data["pattern"], pattern.shape), pattern, rtol=1e-4)
    assert (view.data["threshold"], view.data["across"]) == (0.3, True)
    assert view.data["keys"] == KEYS
    assert "(top) to the key tokens (bottom)" in view.reading
    assert "Each probability is within" in view.reading
    assert "a loop is attention to the token itself" in token_graph(causal(), TOKENS, layers=[2, 5]).reading


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.5, float("nan")])
def test_a_threshold_that_no_weight_can_have_is_refused(threshold: float) -> None:
    with pytest.raises(InputError, match=r"`threshold` must be above 0 and at most 1; got .*\. Try 0\.1"):
        token_graph(causal(), TOKENS, layers=[2, 5], threshold=threshold)


@pytest.mark.browser
@pytest.mark.parametrize("make", [causal, both_ways])
def test_edges_are_the_weights_of_at_least_the_threshold(
    shown: Callable[[View], Any], make: Callable[[], np.ndarray]
) -> None:
    pattern = make()
    page = shown(token_graph(pattern, TOKENS, layers=[2, 5]))
    for layer, head, threshold in ((0, 0, 0.1), (0, 2, 0.25), (1, 1, 0.5), (1, 0, 0.01)):
        choose(page, "Layer", str([2, 5][layer]))
        choose(page, "Head", str(head))
        set_threshold(page, threshold)
        chosen = pattern[layer, head]
        np.testing.assert_allclose(weights(page), chosen, rtol=1e-4)
        assert edges(page) == above(chosen, threshold)
        share = 100 * chosen[chosen >= threshold].sum() / COUNT
        count = len(above(chosen, threshold))
        sentence = f"L{[2, 5][layer]}H{head}: {count} edges of at least {100 * threshold:.1f}\u00a0%, carrying "
        assert finding(page).startswith(f"{sentence}{share:.1f}\u00a0% of the attention.")
    page.evaluate("document.getElementById('figure-0').control.choose({layer: 1, head: 2, query: 4})")
    np.testing.assert_allclose(weights(page), pattern[1, 2], rtol=1e-4)
    assert selector(page, "Head").input_value() == "2"
    assert edges(page) == {edge for edge in above(pattern[1, 2], 0.01) if 4 in edge}
    page.keyboard.press("Escape")
    choose(page, "Edges of", "mean of the heads")
    np.testing.assert_allclose(weights(page), pattern[1].mean(axis=0), rtol=1e-4)
    page.get_by_label("hide the first token").check()
    if make is causal:  # row 0 has no other key
        np.testing.assert_allclose(weights(page)[1:], without(pattern[1], [0])[:, 1:].mean(axis=0), rtol=1e-4)
        assert "No key remains for query 0 “" in finding(page) and all(key > 0 for _, key in edges(page))
    assert finding(page).startswith(f"Mean of the {HEADS} heads of layer 5: ")


@pytest.mark.browser
def test_arrows_to_earlier_tokens_pass_above_and_to_later_ones_below(shown: Callable[[View], Any]) -> None:
    pattern = np.zeros((1, 1, 3, 3), dtype=np.float32)
    pattern[0, 0, 0, 2] = pattern[0, 0, 1, 1] = pattern[0, 0, 2, 1] = 1
    page = shown(token_graph(pattern, ["a", "b", "c"], layers=[0], threshold=1.0))
    assert edges(page) == {(0, 2), (1, 1), (2, 1)}
    boxes = page.eval_on_selector_all(
        ".attnmech-graph-tip",
        """tips => tips.map(tip => {
             const here = tip.getBoundingClientRect();
             const nodes = [...document.querySelectorAll(".attnmech-graph button")];
             const middle = (here.left + here.right) / 2;
             const node = nodes.findIndex(node => {
               const box = node.getBoundingClientRect();
               return box.left < middle && middle < box.right;
             });
             return [node, here.top < nodes[node].getBoundingClientRect().top ? "above" : "below"];
           })""",
    )
    assert sorted(map(tuple, boxes)) == [(1, "above"), (1, "above"), (2, "below")]
    widths = page.eval_on_selector_all(
        ".attnmech-graph path[stroke-width]", "all => all.map(one => one.getBBox().width)"
    )
    assert len([width for width in widths if width > 0]) == 3


@pytest.mark.browser
def test_a_token_alone_by_pointer_and_keyboard(shown: Callable[[View], Any]) -> None:
    pattern = both_ways()
    page = shown(token_graph(pattern, TOKENS, layers=[2, 5]))
    page.evaluate("window.heard = []; addEventListener('attnmech-choose', ({detail}) => window.heard.push(detail))")
    whole = above(pattern[0, 0], 0.1)

    def of(token: int) -> set[tuple[int, int]]:
        return {edge for edge in whole if token in edge}

    page.hover(".attnmech-graph button >> nth=3")
    assert edges(page) == of(3)
    box = page.inner_text(".attnmech-box").replace("\u2068", "").replace("\u2069", "").split("\n")
    top = int(pattern[0, 0, 3].argmax())
    assert box[0] == f"query 3 “{visible_token(TOKENS[3])}” gives"
    share, rest = box[1].split("\u00a0")
    assert float(share) == pytest.approx(100 * pattern[0, 0, 3, top], abs=0.06)
    assert rest == f"% to {top} “{visible_token(TOKENS[top])}”"
    received = box.index(f"key 3 “{visible_token(TOKENS[3])}” receives")
    most = int(pattern[0, 0, :, 3].argmax())
    assert f"\u00a0% from query {most} “{visible_token(TOKENS[most])}”" in box[received + 1]
    page.hover(".attnmech-finding")
    assert edges(page) == whole
    page.focus(".attnmech-graph button >> nth=0")
    for key, token in (("ArrowRight", 1), ("End", 6), ("ArrowLeft", 5), ("Home", 0), ("ArrowDown", 1)):
        page.keyboard.press(key)
        assert edges(page) == of(token)
    page.keyboard.press("Enter")
    assert f"query 1 “{visible_token(TOKENS[1])}” gives" in finding(page)
    assert f"; key 1 “{visible_token(TOKENS[1])}” receives" in finding(page)
    assert page.evaluate("window.heard") == [{"query": 1}]
    page.keyboard.press("Escape")
    assert edges(page) == whole


@pytest.mark.browser
def test_cross_attention_has_two_lines(shown: Callable[[View], Any]) -> None:
    pattern = both_ways(len(KEYS))
    page = shown(token_graph(pattern, TOKENS, layers=[2, 5], keys=KEYS, threshold=0.2))
    assert page.locator("[aria-label='query tokens'] bdi").all_inner_texts() == [visible_token(each) for each in TOKENS]
    assert page.locator("[aria-label='key tokens'] bdi").all_inner_texts() == KEYS
    assert edges(page) == above(pattern[0, 0], 0.2)
    page.hover("[aria-label='key tokens'] button >> nth=2")
    assert edges(page) == {edge for edge in above(pattern[0, 0], 0.2) if edge[1] == 2}
    assert page.locator(".attnmech img, .attnmech a, .attnmech script, .attnmech b").count() == 0
    assert page.evaluate("window.owned") is None


@pytest.mark.browser
@pytest.mark.parametrize("keys", [None, [f"key{index}" for index in range(40)]], ids=["one line", "two lines"])
def test_on_paper_every_token_and_arrow_is_within_its_width(
    shown: Callable[[View], Any], keys: list[str] | None
) -> None:
    count = 40
    scores = np.random.default_rng(4).normal(size=(1, 1, count, count)) * 3
    pattern = (np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)).astype(np.float32)
    page = shown(token_graph(pattern, [f" token{index}" for index in range(count)], layers=[0], keys=keys))
    whole = above(pattern[0, 0], 0.1)
    box, nodes = page.locator(".attnmech-graph-box"), page.locator(".attnmech-graph-box button")
    line = nodes.last.bounding_box()["x"]
    assert line > 1280  # on the screen, the line scrolls
    page.emulate_media(media="print")
    page.wait_for_selector("html.printing")
    paper = box.bounding_box()
    assert paper["width"] <= 700
    drawn = page.eval_on_selector_all(
        ".attnmech-graph-box :is(button, path)",
        "all => all.map(one => one.getBoundingClientRect()).map(({ x, y, right, bottom }) => [x, y, right, bottom])",
    )
    assert len(drawn) == nodes.count() + 2 * len(whole)
    for left, top, right, bottom in drawn:
        assert paper["x"] <= left and right <= paper["x"] + paper["width"]
        assert paper["y"] <= top and bottom <= paper["y"] + paper["height"]
    ends = page.evaluate(
        """() => {
             const names = document.querySelector("[aria-label='key tokens']") ? "key tokens" : "tokens";
             const nodes = document.querySelectorAll(`[aria-label='${names}'] button`);
             const tips = [...document.querySelectorAll(".attnmech-graph-tip")];
             return document.getElementById("figure-0").control.edges().toReversed().map(({ key }, at) => {
               const [node, tip] = [nodes[key].getBoundingClientRect(), tips[at].getBoundingClientRect()];
               const aside = Math.abs((tip.left + tip.right) / 2 - (node.left + node.right) / 2);
               return [aside, Math.min(Math.abs(tip.bottom - node.top), Math.abs(tip.top - node.bottom))];
             });
           }"""
    )
    assert len(ends) == len(whole)
    beside, apart = np.max(ends, axis=0)
    assert beside < 9 and apart < 1  # a loop ends beside the middle
    page.emulate_media(media="screen")
    page.wait_for_selector("html:not(.printing)")
    assert nodes.last.bounding_box()["x"] == line
    assert edges(page) == whole


@pytest.mark.browser
def test_too_many_edges_are_not_drawn_but_counted(shown: Callable[[View], Any]) -> None:
    count = 90
    pattern = np.full((1, 1, count, count), 1 / count, dtype=np.float32)
    page = shown(token_graph(pattern, [f"{index}," for index in range(count)], layers=[0], threshold=0.011))
    assert edges(page) == set()
    assert "8,100 edges of at least 1.1\u00a0%" in finding(page)
    assert "too many to draw: raise the threshold" in finding(page)
    page.hover(".attnmech-graph button >> nth=3")
    assert len(edges(page)) == 2 * count - 1
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.hover(".attnmech-finding")
    set_threshold(page, 0.012)
    assert "0 edges of at least 1.2\u00a0%" in finding(page)
