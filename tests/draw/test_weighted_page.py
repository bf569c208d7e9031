"""In a real browser: value-weighted attention instead of probabilities, in every view of a report."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bs4 import BeautifulSoup

from attnmech.draw.numbers import ScoreNumbers, row_sentences

from .conftest import TOKENS, choose_by_address, page, sections_of, settle, visiting
from .test_page_in_browser import drawn_at, slots_filled

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def weighted(view: ScoreNumbers) -> ScoreNumbers:
    """The same text with norms by layer, head and key, one of them 0."""
    norms = np.exp(np.random.default_rng(3).normal(size=(*view.scores.shape[:2], len(TOKENS)))).astype(np.float32)
    norms[1, 2, 3] = 0
    return replace(view, value_norms=norms)


@pytest.fixture(scope="module")
def html(weighted: ScoreNumbers) -> str:
    return page(weighted, sections_of(weighted))


visit = visiting("html", "module")


@pytest.fixture
def opened_weighted(visit: Any) -> Any:
    choose_by_address(visit, "#weight=value&layer=5&head=2&query=6")
    visit.uncheck("#sentence-view label:has-text('hide the first token') input")
    return visit


def carried(view: ScoreNumbers, layer: int, head: int) -> np.ndarray:
    """p_ij n_j, each row divided by its sum, by a loop."""
    assert view.value_norms is not None
    found = np.zeros((len(TOKENS), len(TOKENS)))
    for query in range(len(TOKENS)):
        for key in range(query + 1):
            found[query, key] = view.pattern[layer, head, query, key] * view.value_norms[layer, head, key]
        found[query] /= found[query].sum()
    return found


def test_every_view_draws_what_attention_carries(opened_weighted: Any, weighted: ScoreNumbers) -> None:
    expected = carried(weighted, 1, 2)
    weights = opened_weighted.evaluate("document.getElementById('sentence-view').control.weights()[0]")
    np.testing.assert_allclose(np.array(weights, dtype=float), expected, rtol=1e-3, atol=1e-9)
    weights = opened_weighted.evaluate("document.getElementById('token-graph').control.weights()")
    np.testing.assert_allclose(np.array(weights, dtype=float), expected, rtol=1e-3, atol=1e-9)
    assert (expected >= 0.1).sum() != (weighted.pattern[1, 2] >= 0.1).sum()
    opened_weighted.click(".token >> nth=6")
    shades = opened_weighted.eval_on_selector_all(
        ".token", "all => all.map(one => one.style.getPropertyValue('--depth'))"
    )
    np.testing.assert_allclose(np.array(shades, dtype=float) ** 2, expected[6], rtol=1e-3, atol=1e-9)
    assert (
        opened_weighted.locator(".token >> nth=5")
        .get_attribute("title")
        .startswith("token 5: value-weighted attention")
    )
    sentence = str(row_sentences(weighted).at({"weight": 1, "layer": 1, "head": 2, "query": 6}))
    assert opened_weighted.inner_text("#row-finding") == sentence and f"{100 * expected[6].max():.1f}" in sentence


def test_a_hidden_key_leaves_its_share_to_the_others(opened_weighted: Any, weighted: ScoreNumbers) -> None:
    opened_weighted.check("#sentence-view label:has-text('hide the first token') input")
    expected = carried(weighted, 1, 2)
    expected[:, 0] = 0
    weights = opened_weighted.evaluate("document.getElementById('sentence-view').control.weights()[0]")
    found = np.array(weights, dtype=float)[1:]
    np.testing.assert_allclose(found, expected[1:] / expected[1:].sum(-1, keepdims=True), rtol=1e-3, atol=1e-9)
    words = opened_weighted.inner_text("#sentence-view .attnmech-finding")
    assert words.startswith("L5H2 (value-weighted): ") and "of the remaining value-weighted attention" in words


def test_small_maps_lines_and_edges_follow_the_choice(opened_weighted: Any, weighted: ScoreNumbers) -> None:
    def pixels() -> Any:
        return opened_weighted.evaluate(
            """() => {
                 const map = document.querySelectorAll("#model-view canvas")[5];
                 const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
                 return [...data].filter((_, i) => i % 4 == 3);
            }"""
        )

    settle(opened_weighted)
    for choice, shares in (("value", carried(weighted, 1, 2)), ("p", weighted.pattern[1, 2])):
        opened_weighted.select_option("#weight", choice)
        settle(opened_weighted)
        np.testing.assert_allclose(pixels(), 255 * np.sqrt(shares.flatten()), atol=1.01)
        weights = opened_weighted.evaluate("document.getElementById('sentence-view').control.weights()[0]")
        np.testing.assert_allclose(np.array(weights, dtype=float), shares, rtol=1e-3, atol=1e-9)
        edges = opened_weighted.evaluate("document.getElementById('token-graph').control.edges().length")
        assert edges == (shares >= 0.1).sum()
        legend = opened_weighted.inner_text("#model-view .attnmech-model-scale")
        assert legend.startswith("share of the row's ‖p f(x)‖" if choice == "value" else "probability")


def test_figure_1_shows_the_shares_and_its_call_makes_them(opened_weighted: Any, weighted: ScoreNumbers) -> None:
    opened_weighted.select_option("#measure", "value")
    section = next(each for each in sections_of(weighted) if "attention-map" in each.figures)
    chosen = {"weight": 1, "layer": 1, "head": 2, "measure": 3, "query": 6}
    assert slots_filled(opened_weighted, [section], chosen) > 5
    drawn, visible = drawn_at(opened_weighted, "attention-map", "data.3.z", "data.3.visible")
    np.testing.assert_allclose(
        np.nan_to_num(np.array(drawn, dtype=float)), carried(weighted, 1, 2), rtol=1e-3, atol=1e-9
    )
    assert visible
    call = opened_weighted.inner_text("#attention-map-section code")
    assert call == 'acts.show("pattern", view="attention_pattern")'
    opened_weighted.select_option("#measure", "relative")
    call = opened_weighted.inner_text("#attention-map-section code")
    assert call == 'scores.plot("attention_map_relative", layer=5, head=2)'


def test_without_norms_there_is_no_such_choice(page_html: str, html: str) -> None:
    selects = [
        {tag["id"]: len(tag("option")) for tag in BeautifulSoup(each, "html.parser")("select")}
        for each in (page_html, html)
    ]
    assert "weight" not in selects[0] and selects[0]["measure"] == 3
    assert selects[1]["weight"] == 2 and selects[1]["measure"] == 4
