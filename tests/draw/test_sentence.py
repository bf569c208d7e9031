"""The sentence view: its input, and, in a real browser, its lines, words and keyboard control."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from unpacking import unpacked

from attnmech.draw.embed import View
from attnmech.draw.sentence import sentence_view
from attnmech.draw.text import visible_token
from attnmech.errors import InputError

from .conftest import TOKENS
from .token_pages import COUNT, HEADS, causal, choose, finding, selector, weights, without

SPECIAL = [False, True, False, False, True, False, False]


def test_the_payload_holds_the_pattern() -> None:
    pattern = causal()
    view = sentence_view(torch.from_numpy(pattern), TOKENS, layers=[2, 5], special=SPECIAL)
    np.testing.assert_allclose(unpacked(view.data["pattern"], pattern.shape), pattern, rtol=1e-4)
    assert view.data["layers"] == [2, 5]
    assert view.data["heads"] == HEADS
    assert view.data["queries"] == view.data["keys"] == [visible_token(token) for token in TOKENS]
    assert view.data["special"] == SPECIAL
    assert "rest" not in view.data
    assert "Each probability is within" in view.reading


def test_what_a_sink_takes_is_carried() -> None:
    pattern = causal()[:1] * np.array([0.25, 1, 0.5], dtype=np.float32)[:, None, None]
    view = sentence_view(pattern, TOKENS, layers=[2], sums_to_one=False)
    rest = unpacked(view.data["rest"], (1, HEADS, COUNT))
    np.testing.assert_allclose(rest[0], np.array([[0.75], [0], [0.5]]) * np.ones(COUNT), rtol=1e-4)


def test_special_has_an_entry_for_each_key() -> None:
    with pytest.raises(InputError, match=r"`special` must have one bool for each of the 7 key tokens; got 1"):
        sentence_view(causal(), TOKENS, layers=[2, 5], special=[True])


def lines(page: Any) -> list[dict[str, Any]]:
    return list(
        page.evaluate(
            """async () => {
                 for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
                 return document.getElementById('figure-0').control.lines();
               }"""
        )
    )


def cells(page: Any) -> set[tuple[int, int]]:
    return {(line["query"], line["key"]) for line in lines(page)}


def inked(page: Any) -> int:
    return int(
        page.evaluate(
            """() => {
                 const canvas = document.querySelector(".attnmech-sentence-lines canvas");
                 const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                 return data.filter((value, index) => index % 4 === 3 && value).length;
               }"""
        )
    )


@pytest.mark.browser
def test_lines_are_those_of_the_chosen_head_and_of_at_least_the_chosen_weight(shown: Callable[[View], Any]) -> None:
    pattern = causal()
    page = shown(sentence_view(pattern, TOKENS, layers=[2, 5]))
    for layer, head in ((0, 0), (0, 2), (1, 1)):
        choose(page, "Layer", str([2, 5][layer]))
        choose(page, "Head", str(head))
        np.testing.assert_allclose(weights(page), pattern[layer, head][None], rtol=1e-4)
        expected = pattern[layer, head]
        assert cells(page) == {(query, key) for query, key in np.argwhere(expected >= 0.02).tolist()}
        share = 100 * expected[expected >= 0.02].sum() / COUNT
        count = (expected >= 0.02).sum()
        sentence = f"L{[2, 5][layer]}H{head}: {count} lines of at least 2.0\u00a0%, carrying {share:.1f}\u00a0% of"
        assert finding(page).startswith(sentence)
    assert inked(page) > 1000
    page.get_by_label("Minimum weight shown").press("End")
    assert cells(page) == {(query, key) for query, key in np.argwhere(pattern[1, 1] >= 0.5).tolist()}
    assert "lines of at least 50.0\u00a0%" in finding(page)
    page.get_by_label("Minimum weight shown").press("Home")
    page.evaluate("document.getElementById('figure-0').control.choose({layer: 1, head: 2, query: 4})")
    np.testing.assert_allclose(weights(page)[0], pattern[1, 2], rtol=1e-4)
    assert selector(page, "Layer").input_value() == "5"
    assert {query for query, _ in cells(page)} == {4}


@pytest.mark.browser
def test_lines_fill_a_window_that_grows(shown: Callable[[View], Any]) -> None:
    """A notebook's frame takes the height of what it shows, once that is drawn."""
    page = shown(sentence_view(causal(), TOKENS, layers=[2, 5]))
    for height, share in ((150, pytest.approx(0.5, abs=0.4)), (900, 1)):
        page.set_viewport_size({"width": 1280, "height": height})
        page.wait_for_timeout(200)
        heights = [
            page.locator(f".attnmech-sentence-lines{part}").evaluate("one => one.clientHeight")
            for part in (" canvas", "")
        ]
        assert heights[0] / heights[1] == share


@pytest.mark.browser
def test_hiding_the_first_token_normalises_again(shown: Callable[[View], Any]) -> None:
    pattern = causal()
    page = shown(sentence_view(pattern, TOKENS, layers=[2, 5], special=SPECIAL))
    page.get_by_label("hide the first token").check()
    np.testing.assert_allclose(weights(page), without(pattern[0, :1], [0]), rtol=1e-4)
    assert {key for _, key in cells(page)} == set(range(1, COUNT))
    assert "Hidden: key 0 “" in finding(page)
    assert f"”, which had {100 * pattern[0, 0, :, 0].mean():.1f}\u00a0% of the attention" in finding(page)
    assert "of the remaining attention." in finding(page)
    assert finding(page).endswith(f"No key remains for query 0 “{visible_token(TOKENS[0])}”.")
    assert page.locator(".attnmech-sentence-blank").count() == page.locator(".attnmech-sentence-hidden").count() == 1
    page.get_by_label("hide special tokens").check()
    np.testing.assert_allclose(weights(page), without(pattern[0, :1], [0, 1, 4]), rtol=1e-4)
    assert page.locator(".attnmech-sentence-blank").count() == 2
    page.get_by_label("hide the first token").uncheck()
    np.testing.assert_allclose(weights(page), without(pattern[0, :1], [1, 4]), rtol=1e-4)


@pytest.mark.browser
def test_a_key_that_has_nearly_all_is_hidden_exactly(shown: Callable[[View], Any]) -> None:
    others = np.array([5e-8, 3e-8, 1.5e-8, 5e-9, 1e-12, 1e-20])
    row = np.array([1 - others.sum(), *others], dtype=np.float32)
    assert row[0] == pytest.approx(0.9999999, abs=1e-8)
    pattern = np.broadcast_to(row, (1, 1, COUNT, COUNT))
    page = shown(sentence_view(pattern, TOKENS, layers=[0]))
    page.get_by_label("hide the first token").check()
    np.testing.assert_allclose(weights(page)[0], [[0, *(others / others.sum())]] * COUNT, rtol=1e-3)


@pytest.mark.browser
def test_a_sink_stays_in_the_softmax(shown: Callable[[View], Any]) -> None:
    pattern = causal()[:1] * np.array([0.3, 0.9, 0.6], dtype=np.float32)[:, None, None]
    page = shown(sentence_view(pattern, TOKENS, layers=[2], sums_to_one=False))
    np.testing.assert_allclose(weights(page)[0], pattern[0, 0], rtol=1e-4)
    page.get_by_label("hide the first token").check()
    np.testing.assert_allclose(weights(page), without(pattern[0, :1], [0], rest=True), rtol=2e-4)
    assert np.nansum(weights(page)[0], axis=-1).max() < 0.99
    assert "No key remains for query 0" in finding(page)


@pytest.mark.browser
def test_all_heads_and_their_mean(shown: Callable[[View], Any]) -> None:
    pattern = causal()
    pattern[0, 1, 3] = [1, 0, 0, 0, 0, 0, 0]  # without the first key, this row of head 1 is empty
    page = shown(sentence_view(pattern, TOKENS, layers=[2, 5]))
    choose(page, "Lines of", "all heads")
    np.testing.assert_allclose(weights(page), pattern[0], rtol=1e-4)
    assert {line["head"] for line in lines(page)} == set(range(HEADS))
    assert finding(page).startswith(f"All {HEADS} heads of layer 2: ")
    assert page.locator(".attnmech-sentence-legend button canvas").count() == HEADS
    choose(page, "Lines of", "mean of the heads")
    np.testing.assert_allclose(weights(page)[0], pattern[0].mean(axis=0), rtol=1e-4)
    assert not page.locator(".attnmech-controls label >> nth=1").is_visible()
    page.get_by_label("hide the first token").check()
    each = without(pattern[0], [0])
    assert np.isnan(each[1, 3]).all() and not np.isnan(each[0, 3]).any()
    np.testing.assert_allclose(weights(page)[0, 1:], np.nanmean(each[:, 1:], axis=0), rtol=1e-4)
    assert np.isnan(weights(page)[0, 0]).all()


@pytest.mark.browser
def test_heads_are_switched_off_and_on_in_the_legend(shown: Callable[[View], Any]) -> None:
    pattern = causal()
    page = shown(sentence_view(pattern, TOKENS, layers=[2, 5]))
    heads = page.get_by_role("group", name="heads").get_by_role("button")
    assert heads.count() == 0  # a single head has a selector
    choose(page, "Lines of", "all heads")
    assert heads.count() == HEADS
    heads.nth(1).click()
    assert [head.get_attribute("aria-pressed") for head in heads.all()] == ["true", "false", "true"]
    np.testing.assert_allclose(weights(page), pattern[0, [0, 2]], rtol=1e-4)
    assert {line["head"] for line in lines(page)} == {0, 2}
    count = (pattern[0, [0, 2]] >= 0.02).sum()
    assert finding(page).startswith(f"L2H0 and L2H2: {count} lines of at least 2.0\u00a0%")
    choose(page, "Layer", "5")
    np.testing.assert_allclose(weights(page), pattern[1, [0, 2]], rtol=1e-4)
    choose(page, "Lines of", "mean of the heads")
    np.testing.assert_allclose(weights(page)[0], pattern[1, [0, 2]].mean(axis=0), rtol=1e-4)
    assert finding(page).startswith("Mean of L5H0 and L5H2: ")
    page.get_by_label("hide the first token").check()
    had = 100 * pattern[1, [0, 2], :, 0].mean()
    assert f", which had {had:.1f}\u00a0% of the attention" in finding(page)
    page.get_by_label("hide the first token").uncheck()
    heads.nth(0).focus()
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "head 0"
    np.testing.assert_allclose(weights(page)[0], pattern[1, 2], rtol=1e-4)
    assert finding(page).startswith("Mean of L5H2: ")
    heads.nth(2).click()
    assert finding(page) == "All heads of layer 5 are switched off."
    assert lines(page) == [] and page.locator(".attnmech-sentence-blank").count() == 0
    for head in heads.all():
        head.press("Enter")
    np.testing.assert_allclose(weights(page)[0], pattern[1].mean(axis=0), rtol=1e-4)
    choose(page, "Lines of", "one head")
    np.testing.assert_allclose(weights(page)[0], pattern[1, 0], rtol=1e-4)


@pytest.mark.browser
def test_pointing_and_pinning(shown: Callable[[View], Any]) -> None:
    pattern = causal()
    page = shown(sentence_view(pattern, TOKENS, layers=[2, 5]))
    page.evaluate("window.heard = []; addEventListener('attnmech-choose', ({detail}) => window.heard.push(detail))")
    row = pattern[0, 0, 5]
    order = np.argsort(-row)
    page.hover(".attnmech-sentence-query button >> nth=5")
    assert cells(page) == {(5, int(key)) for key in np.flatnonzero(row >= 0.02)}
    box = page.inner_text(".attnmech-box").replace("\u2068", "").replace("\u2069", "").split("\n")
    expected = [
        f"{100 * row[key]:.1f}\u00a0% to {key} “{visible_token(TOKENS[key])}”" for key in order if row[key] > 0.001
    ]
    assert box[0] == f"query 5 “{visible_token(TOKENS[5])}” gives"
    assert box[1 : 1 + len(expected)] == expected
    page.hover(".attnmech-sentence-key button >> nth=2")
    assert cells(page) == {(int(query), 2) for query in np.flatnonzero(pattern[0, 0, :, 2] >= 0.02)}
    page.hover(".attnmech-finding")
    assert len(lines(page)) == (pattern[0, 0] >= 0.02).sum()
    page.click(".attnmech-sentence-query button >> nth=5")
    page.hover(".attnmech-finding")
    assert {query for query, _ in cells(page)} == {5}
    assert f"query 5 “{visible_token(TOKENS[5])}” gives {expected[0]}, {expected[1]} and {expected[2]}." in finding(
        page
    )
    assert page.evaluate("window.heard") == [{"query": 5}]
    page.keyboard.press("Escape")
    assert len(lines(page)) == (pattern[0, 0] >= 0.02).sum()


@pytest.mark.browser
def test_the_keyboard_goes_through_the_tokens(shown: Callable[[View], Any]) -> None:
    page = shown(sentence_view(causal(), TOKENS, layers=[2, 5], title=TOKENS[0]))
    assert page.locator(".attnmech-sentence-query bdi").all_inner_texts() == [visible_token(token) for token in TOKENS]
    page.get_by_label("Minimum weight shown").focus()
    page.keyboard.press("Tab")  # the scrolling box may be a tab stop itself
    if page.evaluate("document.activeElement.tagName") != "BUTTON":
        page.keyboard.press("Tab")
    for key, query in (("ArrowDown", 1), ("ArrowDown", 2), ("End", 6), ("ArrowDown", 6), ("ArrowUp", 5), ("Home", 0)):
        page.keyboard.press(key)
        assert {line["query"] for line in lines(page)} == {query}
    assert page.is_visible(".attnmech-box")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    pressed = page.locator('.attnmech-sentence-box [aria-pressed="true"]')
    assert pressed.inner_text().startswith("1")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.parentElement.getAttribute('aria-label')") == "key tokens"
    page.keyboard.press("Escape")
    assert pressed.count() == 0
    assert page.locator(".attnmech img, .attnmech a, .attnmech script").count() == 0
    assert page.evaluate("window.owned") is None


@pytest.mark.browser
def test_in_a_page_with_its_own_selectors(shown: Callable[[View], Any]) -> None:
    page = shown(sentence_view(causal(), TOKENS, layers=[2, 5]))
    selects, row = page.evaluate(
        """async count => {
             const data = JSON.parse(document.getElementById("figure-0-data").textContent);
             const stage = document.createElement("div");
             document.body.append(stage);
             const pattern = { of: (layer, head) => new Float32Array(count * count).fill((1 + layer + head) / 10) };
             const control = await attnmech.views.sentence(stage, { ...data, pattern, embedded: true });
             control.choose({ layer: 1, head: 2 });
             return [stage.querySelectorAll("select").length, control.weights()[0][3]];
           }""",
        COUNT,
    )
    assert selects == 1  # one head, all heads, their mean
    assert row == pytest.approx([0.4] * COUNT)


@pytest.mark.browser
def test_cross_attention_with_other_keys(shown: Callable[[View], Any]) -> None:
    scores = np.random.default_rng(1).normal(size=(1, 2, COUNT, 4))
    pattern = (np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)).astype(np.float32)
    page = shown(sentence_view(pattern, TOKENS, layers=[1], keys=["שלום", "🙂", "1,2", "\u202eevil"]))
    assert page.locator(".attnmech-sentence-key bdi").all_inner_texts() == ["שלום", "🙂", "1,2", "⟨202E⟩evil"]
    page.get_by_label("hide the first token").check()
    np.testing.assert_allclose(weights(page), without(pattern[0, :1], [0]), rtol=1e-4)
    assert page.locator(".attnmech-sentence-blank").count() == 0


@pytest.mark.browser
def test_a_thousand_tokens_fit_a_phone(shown: Callable[[View], Any]) -> None:
    count = 1000
    pattern = np.tril(np.ones((1, 1, count, count), dtype=np.float32)) / np.arange(1, count + 1)[:, None]
    page = shown(sentence_view(pattern.astype(np.float32), [f" token{index}" for index in range(count)], layers=[0]))
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('.attnmech-sentence-box').clientHeight") <= 0.7 * 800
    page.evaluate("document.querySelector('.attnmech-sentence-box').scrollTop = 24 * 40")
    last = max(query for query, _ in cells(page))
    assert last in {48, 49}  # weights of 1/50 may round to either side of 2 %
    assert f"{(last + 1) * (last + 2) // 2:,} lines" in finding(page)
    page.get_by_label("Minimum weight shown").press("Home")
    assert len(lines(page)) == 600
    drawn = page.inner_text(".attnmech-sentence > .attnmech-reading:not(.attnmech-list)")
    assert drawn.startswith("Only the heaviest 600 of the ")
