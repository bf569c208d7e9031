"""Figures 4 to 6 rank heads within a layer, never across layers, and name the correct head at every point."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparing import refuses

from attnmech.draw.numbers import FocusNumbers
from attnmech.methods.focus.figures import MOST_TIED_HEADS, rank_lines

LAYERS = (3, 4, 7, 9, 12)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).permutation(20).reshape(5, 4).astype(np.float32) / 20


def ranks(values: np.ndarray, layers: tuple[int, ...] = LAYERS, chosen: Any = None, **ends: Any) -> Any:
    values = np.asarray(values, dtype=np.float32)
    view = FocusNumbers(layers, values, values, values, values, "all rows", **ends)
    return rank_lines(view, "self_top", chosen)


def lines(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.meta != "chosen"]


def test_lines_never_cross_and_hold_each_layers_own_numbers(values: np.ndarray) -> None:
    drawn = np.array([line.y for line in lines(ranks(values))])
    assert drawn.shape == (4, 5)
    assert (np.diff(drawn, axis=0) < 0).all()
    for layer in range(5):
        assert drawn[:, layer].tolist() == sorted(values[layer].tolist(), reverse=True)


def test_every_point_names_its_true_head(values: np.ndarray) -> None:
    for line in lines(ranks(values)):
        assert list(line.x) == list(LAYERS)
        for layer, (head, words, interval) in enumerate(line.customdata):
            assert values[layer, head] == line.y[layer]
            assert (words, interval) == (f"L{LAYERS[layer]}H{head}", "")


def test_heads_under_one_point_are_all_named() -> None:
    words = [line.customdata[0][1] for line in lines(ranks(np.array([[0.5, 0.1, 0.5]]), (0,)))]
    assert words == ["L0H0 (tied with H2)", "L0H2 (tied with H0)", "L0H1"]


def test_of_many_heads_under_one_point_some_are_named_and_the_rest_counted() -> None:
    (line, *_) = lines(ranks(np.zeros((1, MOST_TIED_HEADS + 4)), (0,)))
    assert line.customdata[0][1] == "L0H0 (tied with H1, H2, H3, H4, H5, H6 and 3 more)"


def test_a_head_without_a_number_ranks_last_and_leaves_a_gap() -> None:
    drawn = lines(ranks(np.array([[np.nan, 0.25, 0.125], [0.375, 0.5, 0.4375]]), (0, 1)))
    assert [line.y for line in drawn[:2]] == [(0.25, 0.5), (0.125, 0.4375)]
    assert np.isnan(drawn[2].y[0])
    assert drawn[2].customdata[0][1] == "L0H0"
    assert drawn[2].y[1] == 0.375


def test_the_hover_box_gives_the_heads_own_interval(values: np.ndarray) -> None:
    for line in lines(ranks(values, low={"self_top": values / 2}, high={"self_top": values / 2 + 0.5})):
        for value, (_, _, interval) in zip(line.y, line.customdata, strict=True):
            assert interval == f" ({value / 2:.3f} to {value / 2 + 0.5:.3f})"


def test_ranks_differ_in_depth_of_one_hue(values: np.ndarray) -> None:
    colours = [line.line.color for line in lines(ranks(values))]
    depths = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert depths == sorted(depths)
    assert len(set(colours)) == 4


def test_each_figure_rings_its_own_number(focus: FocusNumbers) -> None:
    for name, numbers in (("self_top", focus.self_top), ("first_top", focus.first_top)):
        ring = rank_lines(focus, name, chosen=(7, 1)).data[-1]
        assert (ring.meta, list(ring.x), list(ring.y)) == ("chosen", [7], [numbers[3, 1]])


@pytest.mark.parametrize(
    ("name", "words"),
    [("self_top", "at the token itself"), ("first_top", "at the first token"), ("concentration", "p(1) − p(2)")],
)
def test_each_figure_draws_its_number(name: str, words: str, focus: FocusNumbers) -> None:
    figure = rank_lines(focus, name)
    assert words in figure.layout.yaxis.title.text
    assert figure.layout.xaxis.title.text == "layer"
    np.testing.assert_array_equal(
        [line.y for line in lines(figure)], np.sort(-getattr(focus, name), axis=1).T * np.float32(-1)
    )


def test_only_the_number_with_intervals_shows_them(focus: FocusNumbers) -> None:
    assert lines(rank_lines(focus, "first_top"))[0].customdata[0][2].startswith(" (")
    assert lines(rank_lines(focus, "self_top"))[0].customdata[0][2] == ""


def test_what_does_not_fit_is_refused(focus: FocusNumbers, values: np.ndarray) -> None:
    refuses(r"one of the layers \[3, 4, 7, 9, 12\]; got 2", ranks, values, chosen=(2, 0))
    refuses("`head` must be from 0 to 3", ranks, values, chosen=(3, 4))
    with pytest.raises(ValueError, match=r"`self_top` must be .* with layer=3; got"):
        replace(focus, layers=(0, 2, 5))
