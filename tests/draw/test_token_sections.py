"""The sections about the selected token of a page: their numbers and sentences, and every slot in a browser."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from browser import WHOLE, opening

from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.numbers import ScoreNumbers
from attnmech.draw.section import Section
from attnmech.draw.text import plotly_text, shorten, visible_token
from attnmech.methods.drift.section import NAMED, DriftNumbers, drift_section
from attnmech.methods.flow.section import flow_section, strongest
from attnmech.methods.segments.section import segment_section

from .conftest import START, TOKENS, choose_by_address, page, sections_of
from .test_page_in_browser import slots_filled

LAYERS = (1, 2, 4, 5)
"""The layers of drift and flow; the page has layers 2 and 5."""
STARTS = (0, 3, 4, 7)
SEGMENTS = tuple("".join(TOKENS[start:end]) for start, end in pairwise(STARTS))


@pytest.fixture(scope="module")
def drift() -> DriftNumbers:
    generator = np.random.default_rng(8)
    count, depth = len(TOKENS), len(LAYERS)
    churn = generator.uniform(size=(count, depth))
    churn[:, 0] = np.nan
    return DriftNumbers(
        layers=LAYERS,
        tokens=TOKENS,
        vocabulary=5000,
        k=10,
        cosine=generator.uniform(-1, 1, size=(count, depth)),
        rank=generator.integers(0, 4999, size=(count, depth)).astype(np.float64),
        churn=churn,
        means={name: generator.uniform(size=depth) for name in ("cosine", "rank", "churn")},
        between_tokens=generator.uniform(size=depth),
        to_any_row=generator.uniform(size=depth),
        nearest=generator.permuted(np.tile(np.arange(6), (count, depth, 1)), axis=2)[..., :NAMED],
        names=("<img src=x onerror=window.owned=1>", " the", "\n$x$", " b", " c", " d"),
    )


@pytest.fixture(scope="module")
def shares() -> np.ndarray:
    found = np.tril(np.random.default_rng(9).uniform(size=(len(LAYERS), len(TOKENS), len(TOKENS))))
    return np.asarray(found / found.sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def masses() -> tuple[np.ndarray, np.ndarray]:
    found = np.random.default_rng(10).uniform(size=(2, 2, 3, 3, 3))
    found /= found.sum(axis=-1, keepdims=True)
    return found[0], found[1]


@pytest.fixture(scope="module")
def sections(drift: DriftNumbers, shares: np.ndarray, masses: tuple[np.ndarray, np.ndarray]) -> list[Section]:
    return [
        drift_section(drift, "drift", (2, 5)),
        flow_section(shares, TOKENS, layers_of_flow=LAYERS, layers=(2, 5), call="flow"),
        segment_section(*masses, SEGMENTS, STARTS, tokens=TOKENS, layers=(2, 5), call="segments"),
    ]


def test_the_strongest_other_source_is_that_of_a_loop(shares: np.ndarray) -> None:
    source, share = strongest(shares)
    for layer, query in np.ndindex(source.shape):
        others = [(shares[layer, query, key], key) for key in range(query)]
        assert (share[layer, query], source[layer, query]) == (max(others) if others else (0, -1))


def test_sentences_say_the_numbers(
    drift: DriftNumbers, shares: np.ndarray, masses: tuple[np.ndarray, np.ndarray], sections: list[Section]
) -> None:
    told = [
        str(each.finding.at({"layer": 1, "head": 2, "query": 3}))
        for each in sections
        if isinstance(each.finding, ByChoice)
    ]
    assert (
        f"cosine {drift.cosine[3, 0]:.2f} with its own embedding in layer 1 and {drift.cosine[3, 3]:.2f} in layer 5"
        in told[0]
    )
    assert f"{drift.rank[3, 0]:,.0f} and {drift.rank[3, 3]:,.0f} of 5,000 rows are more" in told[0]
    layer, key = np.unravel_index(shares[:, 3, :3].argmax(), (len(LAYERS), 3))
    assert f"most from others: {100 * shares[layer, 3, key]:.1f}\u00a0% from {key} " in told[1]
    own = shares[:, 3, 3]
    assert f"in each layer {100 * own.min():.0f}\u00a0% to {100 * own.max():.0f}\u00a0% of its parts" in told[1]
    mass, expected = masses
    other = 0 if mass[1, 2, 1, 0] > mass[1, 2, 1, 2] else 2
    assert "In L5H2, tokens of sentence 1, " in told[2]
    assert f"give {100 * mass[1, 2, 1, 1]:.1f}\u00a0% of their attention to each other" in told[2]
    alone = 100 * expected[1, 2, 1, other]
    assert (
        f"{100 * mass[1, 2, 1, other]:.1f}\u00a0% to sentence {other} (distance baseline {alone:.1f}\u00a0%)" in told[2]
    )


def test_the_table_names_the_nearest_rows_and_its_own_in_bold(drift: DriftNumbers, sections: list[Section]) -> None:
    chart = sections[0].figures["token-nearest"]
    assert isinstance(chart, Chart)
    cells = chart.figure(query=3, layer=0).data[0].cells["values"]
    assert list(cells[0]) == list(LAYERS)
    assert list(cells[1]) == [f"{rank:,.0f}" for rank in drift.rank[3]]
    for place in range(NAMED):
        for layer in range(len(LAYERS)):
            name = drift.names[drift.nearest[3, layer, place]]
            written = plotly_text(shorten(visible_token(name)))
            assert cells[place + 2][layer] == (f"<b>{written}</b>" if name == " the" else written)


@pytest.fixture(scope="module")
def visit(
    chromium: Any, view: ScoreNumbers, sections: list[Section], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "page.html"
    with opening(chromium, page(view, sections_of(view, *sections)), path, **WHOLE) as page_:
        yield page_


@pytest.fixture
def opened_tokens(visit: Any) -> Any:
    choose_by_address(visit, START)
    return visit


@pytest.mark.browser
@pytest.mark.parametrize("chosen", [{"layer": 1, "head": 2, "query": 3}, {"layer": 0, "head": 1, "query": 0}])
def test_the_page_fills_them_as_python_does(
    opened_tokens: Any, sections: list[Section], drift: DriftNumbers, chosen: dict[str, int]
) -> None:
    opened_tokens.select_option("#layer", index=chosen["layer"])
    opened_tokens.select_option("#head", index=chosen["head"])
    opened_tokens.click(f".token >> nth={chosen['query']}")
    assert slots_filled(opened_tokens, sections, chosen) >= 10
    assert opened_tokens.evaluate("window.owned") is None
    assert opened_tokens.locator("#token-nearest img").count() == 0
    shown = opened_tokens.eval_on_selector_all(
        "#token-nearest tbody tr",
        "rows => rows.map(({cells}) => [...cells].slice(2).map(cell => [cell.textContent, cell.style.fontWeight]))",
    )
    nearest = drift.nearest[chosen["query"], :, :NAMED]
    own = drift.tokens[chosen["query"]]
    assert shown == [
        [[shorten(visible_token(drift.names[row])), "700" if drift.names[row] == own else ""] for row in rows]
        for rows in nearest
    ]


@pytest.mark.browser
def test_a_click_on_a_source_follows_it_and_one_on_a_point_chooses_its_layer(opened_tokens: Any) -> None:
    opened_tokens.evaluate(
        """() => { const flow = document.getElementById("token-inflow");
             flow.emit("plotly_click", {points: [{x: flow.data[0].x[2], y: "4"}]}); }"""
    )
    assert opened_tokens.get_attribute('.token[aria-pressed="true"]', "title").startswith("token 2:")
    drawn = opened_tokens.text_content("#token-flow-finding")
    assert drawn.startswith("Token 2 ")
    opened_tokens.evaluate("document.getElementById('token-cosine').emit('plotly_click', {points: [{x: 5}]})")
    assert opened_tokens.input_value("#layer") == "5"
    opened_tokens.evaluate("document.getElementById('token-cosine').emit('plotly_click', {points: [{x: 4}]})")
    assert opened_tokens.input_value("#layer") == "5"  # a layer that the page does not show
