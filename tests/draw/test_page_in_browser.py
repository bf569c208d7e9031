"""In a real, offline browser: choices reach every figure, and hostile text does not run."""

from typing import Any

import numpy as np
import pytest

from attnmech.draw.scores import attention_map, key_terms, share_bars, share_triangle
from attnmech.draw.text import visible_token
from attnmech.draw.view import ScoreView

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
    assert traces(opened, "attention-map") == drawn
    assert [opened.input_value(f"#{name}") for name in ("layer", "head", "rank")] == ["5", "2", "3"]
    assert opened.get_attribute('.token[aria-pressed="true"]', "title").startswith("token 4:")


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
    assert calls[1] == 'scores.plot("score_shares", layer=5, head=0, rank=0)  # </script>'


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
    opened.set_viewport_size({"width": width, "height": 844})
    opened.evaluate("() => new Promise(requestAnimationFrame)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    widths = opened.eval_on_selector_all(".figure", "all => all.map(one => one.layout.width - one.clientWidth)")
    assert widths == [0, 0, 0, 0]
