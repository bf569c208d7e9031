"""The page of a result about heads: what its map and card say equals the table, and a click chooses a head."""

from pathlib import Path
from typing import Any

import models
import numpy as np
import pandas as pd
import pytest
from browser import opening
from unpacking import page_data

import attnmech as am
from attnmech.draw.head_maps import effect_map
from attnmech.draw.section import Section
from attnmech.results.head_page import head_page, heads_of, is_about_heads, is_head_map

HOSTILE = "<img src=x onerror=window.owned=1>"
LAYERS, HEADS = (2, 5), 3
READY = "html[data-ready]"
NOISE = np.array([3e-7, 1e-8, 9e-7, 2e-8, 4e-7])


def table(**columns: Any) -> pd.DataFrame:
    """Heads of layers 2 and 5; L5H1 was not measured."""
    places = [(layer, head) for layer in LAYERS for head in range(HEADS) if (layer, head) != (5, 1)]
    frame = pd.DataFrame(places, columns=["layer", "head"])
    values = np.array([0.5, -2.0, 0.25, 1.5, np.nan])
    low, high = values - 0.75, values + 0.75
    effect = {"effect": values, "effect_low": low, "effect_high": high, "agreeing": [3, 4, 2, 4, 0]}
    return frame.assign(**effect | {"clear": [False, True, False, True, False], "size": [1.0, 2, 3, 4, 50]} | columns)


def page_of(frame: pd.DataFrame, **parts: Any) -> str:
    drawn = {"effects": effect_map(frame[["layer", "head", "effect"]], label="effect")}
    usual: dict[str, Any] = {
        "title": f"Title {HOSTILE}",
        "lead": f"The lead {HOSTILE}.",
        "sections": [Section("Effects", f"How to read {HOSTILE}", drawn, "effects.plot()")],
        "heads": frame,
        "frame": frame,
        "labels": {"effect": "change, nats"},
        "letters": {},
        "provenance": {"model": HOSTILE},
    }
    return head_page(**usual | parts)


def test_numbers_are_columns_with_their_intervals_and_what_is_clear() -> None:
    heads = heads_of(table(), LAYERS, HEADS, {"effect": "change, nats"}, {})
    assert [(number.name, number.label) for number in heads.numbers] == [("effect", "change, nats"), ("size", "size")]
    effect, size = heads.numbers
    np.testing.assert_array_equal(effect.values, [[0.5, -2, 0.25], [1.5, np.nan, np.nan]])
    assert effect.ends is not None and effect.clear is not None
    np.testing.assert_array_equal(effect.ends[0], effect.values - 0.75)
    np.testing.assert_array_equal(effect.ends[1], effect.values + 0.75)
    np.testing.assert_array_equal(effect.clear, [[False, True, False], [True, False, False]])
    np.testing.assert_array_equal(size.values, [[1, 2, 3], [4, np.nan, 50]])
    assert size.ends is None and size.clear is None
    # Bare ends belong to the number before them.
    frame = table()[["layer", "head", "effect"]].assign(low=-1.0, high=2.0, size=range(5))
    first, second = heads_of(frame, LAYERS, HEADS, {}, {}).numbers
    assert (first.name, second.name) == ("effect", "size") and second.ends is None
    assert first.ends is not None and first.ends[1][0, 0] == 2
    # What is clearly unlike an expected share is not pale beside 0.
    frame = table().rename(columns={"clear": "effect_clear"}).assign(effect_expected=0.25)
    (effect, _) = heads_of(frame, LAYERS, HEADS, {}, {}).numbers
    assert effect.ends is not None and effect.clear is None


@pytest.mark.parametrize(
    ("columns", "measured"),
    [({"texts": 8}, 5), ({}, 1), ({"change": NOISE, "exact": NOISE - 1}, 5)],
    ids=["a number that all heads share", "a single head", "rounding in every head, and differences by rounding"],
)
def test_numbers_that_say_nothing_are_left_to_the_table(columns: dict[str, Any], measured: int) -> None:
    layers, heads = (LAYERS, HEADS) if measured > 1 else (LAYERS[:1], 1)
    found = heads_of(table(**columns)[:measured], layers, heads, {}, {})
    assert [number.name for number in found.numbers] == ["effect", "size"]


def test_a_card_has_the_numbers_furthest_from_the_median_head_first() -> None:
    frame = table(
        verdict=["resting", "active", "", "unused", "active"], near_layer=[5, 2, 2, 2, 2], near_head=[0, 2, 1, 0, 1]
    )
    card = heads_of(frame.assign(twin_head=[1, 0, 1, 2, 0]), LAYERS, HEADS, {}, {}).card
    assert card["Verdict"] == [["resting", "active", ""], ["unused", "", "active"]]
    assert card["Near"] == [["L5H0", "L2H2", "L2H1"], ["L2H0", "", "L2H1"]]
    assert card["Twin"] == [["L2H1", "L2H0", "L2H1"], ["L5H2", "", "L5H0"]]
    lines = card["Furthest from the median head first"]
    # The medians are 0.375 and 3; the robust deviations 1.4826 · 0.625 and 1.4826 · 1.
    assert lines[0][1] == "effect: −2 (95 %: −2.75 to −1.25; clear; median 0.375)\nsize: 2 (median 3)"
    assert lines[0][2] == "effect: 0.25 (95 %: −0.5 to 1; not clear; median 0.375)\nsize: 3 (median 3)"
    assert lines[1] == [
        "effect: 1.5 (95 %: 0.75 to 2.25; clear; median 0.375)\nsize: 4 (median 3)",
        "not measured",
        "size: 50 (median 3)",
    ]
    frame = table(score=[-2.0, -1e-17, 1e-17, 2.0, np.nan])[["layer", "head", "score"]]
    (first, *_), *_ = heads_of(frame, LAYERS, HEADS, {}, {}).card["Furthest from the median head first"]
    assert first == "score: −2 (median 0)"  # a median that is only rounding
    frame = table(**{f"number_{n}": np.arange(5.0) * (n + 1) for n in range(9)})
    (first, *_), *_ = heads_of(frame, LAYERS, HEADS, {}, {}).card["Furthest from the median head first"]
    assert first.count("\n") == 8 and first.endswith("The table has 3 more.")
    frame = table(types=["self, first", "first", "", "first", "self"])
    heads = heads_of(
        frame, LAYERS, HEADS, {}, {"self": ("S", "#000"), "first": ("F", "#111"), "induction": ("I", "#222")}
    )
    assert heads.types == [[("self", "first"), ("first",), ()], [("first",), (), ("self",)]]
    assert dict(heads.letters) == {"first": ("F", "#111"), "self": ("S", "#000")}


def test_only_tables_with_a_row_per_head_and_maps_of_heads_are_about_heads() -> None:
    frame = table()
    assert is_about_heads(frame) and is_about_heads(frame[:1])
    assert not is_about_heads(frame[:0])
    assert not is_about_heads(frame.drop(columns="head"))
    assert not is_about_heads(pd.concat([frame, frame]))
    assert not is_about_heads(frame[["layer", "head", "clear"]])
    values = np.eye(2, 3)
    assert is_head_map(effect_map(values)) and is_head_map(effect_map(values, clear=values > 0))
    assert not is_head_map(effect_map(values, columns="position"))


@pytest.mark.parametrize(
    ("lead", "start"), [("L5H2 leads, then L2H0.", (5, 2)), ("L9H0 is elsewhere.", (2, 1)), ("None.", (2, 1))]
)
def test_the_page_begins_with_the_head_of_its_lead_or_the_largest_clear_one(lead: str, start: tuple[int, int]) -> None:
    first = page_data(page_of(table(), lead=lead))["start"]
    assert (first["layer"], first["head"]) == start


def test_pairs_of_heads_keep_the_column_of_figures() -> None:
    pairs = am.ablate_pairs(models.demo(), ["Anna sang of shells."], [((1, 4), (2, 6))])
    assert 'id="head-map"' not in pairs.to_html()


def card_lines(page: Any) -> list[str]:
    return str(page.locator("#card dd").last.inner_text()).split("\n")


@pytest.mark.browser
def test_the_card_of_a_result_follows_the_map_and_equals_the_table(chromium: Any, tmp_path: Path) -> None:
    effects = am.ablate_heads(models.demo(), ["Anna sang of shells.", "Tom gave an old anchor to Clara."])
    frame = effects.by_head().set_index(["layer", "head"])
    with opening(chromium, effects.to_html(), tmp_path / "page.html", ready=READY) as page:
        for layer, head in ((3, 1), (0, 6)):
            page.wait_for_timeout(700)  # clicks in quick succession are one step of Back
            page.locator(".heads-cell").nth(8 * layer + head).click()
            assert page.inner_text("#head-name") == f"L{layer}H{head}"
            assert f"layer={layer}&head={head}" in page.url
            (line,) = [line for line in card_lines(page) if line.startswith("change (nats of loss): ")]
            value = float(line.split(": ")[1].split(" (")[0].replace("−", "-"))
            assert value == pytest.approx(frame.effect[layer, head], rel=5e-4)
        page.go_back()
        assert page.inner_text("#head-name") == "L3H1"
        assert page.locator("#numbers-section tbody tr").count() == 32
        assert page.locator("#tabs").is_hidden()


@pytest.mark.browser
def test_a_view_of_one_layer_follows_the_page_within_that_layer(chromium: Any, tmp_path: Path) -> None:
    texts = ["Anna sang. Tom gave a shell to Clara. Clara sang. Anna gave an anchor to Tom."]
    found = am.segment_attention(models.demo(), texts)
    own = next(section for section in found._sections() if section.name == "lines").figures["lines"]
    (layer,) = own.data["layers"]  # type: ignore[union-attr]
    with opening(chromium, found.to_html(), tmp_path / "page.html", address="#tab=all", ready=READY) as page:
        head = page.locator("#figure-lines select").nth(1)
        page.locator(".heads-cell").nth(8 * layer + 2).click()
        assert head.input_value() == "2"
        page.locator(".heads-cell").nth(8 * (3 - layer) + 5).click()
        assert head.input_value() == "2" and page.inner_text("#head-name") == f"L{3 - layer}H5"
        head.select_option("7")
        assert page.inner_text("#head-name") == f"L{layer}H7"


def click_cell(page: Any, figure: str, row: int, column: int) -> None:
    place = page.evaluate(
        """([id, row, column]) => {
             const { _fullLayout: { xaxis, yaxis } } = document.getElementById(id);
             return { x: xaxis.l2p(column), y: yaxis.l2p(row) };
           }""",
        [figure, row, column],
    )
    plot = page.locator(f"#{figure} .nsewdrag").first
    plot.hover(position=place)
    page.wait_for_selector(f"#{figure} .hovertext")
    plot.click(position=place)


@pytest.mark.browser
def test_a_click_in_a_figure_chooses_the_head(chromium: Any, tmp_path: Path) -> None:
    with opening(chromium, page_of(table()), tmp_path / "page.html", height=1200, ready=READY) as page:
        assert page.inner_text("#head-name") == "L2H1"
        click_cell(page, "figure-effects", 1, 0)
        assert page.inner_text("#head-name") == "L5H0" and "layer=5&head=0" in page.url
        assert page.locator(".heads-cell[aria-selected=true]").get_attribute("aria-label").startswith("L5H0")
        assert page.evaluate("document.getElementById('figure-effects').layout.shapes[0].y0") == 0.5
        assert card_lines(page)[0] == "effect: 1.5 (95 %: 0.75 to 2.25; clear; median 0.375)".replace(
            "effect", "change, nats"
        )


@pytest.mark.browser
def test_hostile_names_stay_text(chromium: Any, tmp_path: Path) -> None:
    frame = table(verdict=[HOSTILE] * 5)
    with opening(chromium, page_of(frame), tmp_path / "page.html", ready=READY) as page:
        assert page.evaluate("window.owned") is None
        assert page.inner_text("h1") == f"The lead {HOSTILE}."
        assert page.locator("#card dd").first.inner_text() == HOSTILE
        assert HOSTILE in page.inner_text("#numbers-section") and HOSTILE in page.inner_text("#provenance-section")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_measured_and_a_single_head_have_pages(chromium: Any, tmp_path: Path, width: int) -> None:
    unmeasured = table(size=np.nan, effect=np.nan, effect_low=np.nan, effect_high=np.nan)
    for frame, text in ((unmeasured, "not measured"), (table()[:1], "change, nats: 0.5")):
        with opening(chromium, page_of(frame), tmp_path / "page.html", width=width, ready=READY) as page:
            assert card_lines(page)[0].startswith(text)
            page.get_by_label("across").select_option(index=1)
            assert page.locator(".heads-scatter").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
