"""The figures hold the numbers of their input, and mark self, first and other at the right places."""

from typing import Any

import numpy as np
import pytest

from attnmech.draw.attention_maps import attention_map, highest_key
from attnmech.draw.numbers import ScoreNumbers
from attnmech.draw.style import MARKS, TERMS
from attnmech.errors import InputError
from attnmech.methods.scores.figures import bars_chart, key_terms_chart, score_shares_chart, triangle_chart

from .conftest import by_meta

NAN = np.nan
TOKENS = ["What", " does", " it", " do"]
LABELS = ["0 What", "1 ·does", "2 ·it", "3 ·do"]
# The highest key: row 0 has only one, row 1 itself, row 2 the first token, row 3 key 1.
SCORES = np.array([[9.0, NAN, NAN, NAN], [0.1, 0.3, NAN, NAN], [2.0, 1.0, -5.0, NAN], [-4.0, -1.0, -2.0, -3.0]])
SHARES = {
    "query_key": np.array([NAN, 0.7, 0.1, 0.25]),
    "key_bias": np.array([NAN, 0.2, 0.3, 0.5]),
    "position": np.array([NAN, 0.1, 0.6, 0.25]),
}
KEYS = np.array([0, 1, 0, 1])


def of_one(chart: Any, shares: Any, keys: Any, tokens: Any) -> Any:
    of_all = {name: share[None, None, :, None] for name, share in shares.items()}
    return chart(of_all, keys[None, None, :, None], tokens).figure(layer=0, head=0, rank=0, query=0)


def key_terms(terms: Any) -> Any:
    chart = key_terms_chart({name: term[None, None] for name, term in terms.items()}, TOKENS)
    return chart.figure(layer=0, head=0)


def test_the_map_holds_the_scores_and_leaves_hidden_cells_blank() -> None:
    figure = attention_map(SCORES, TOKENS)
    heatmap = by_meta(figure)["scores"]
    np.testing.assert_array_equal(heatmap.z, SCORES)
    assert list(heatmap.x) == list(heatmap.y) == list(figure.layout.xaxis.categoryarray) == LABELS


def test_each_row_with_a_choice_is_marked_once() -> None:
    traces = by_meta(attention_map(SCORES, TOKENS))
    marks = {mark: list(zip(traces[mark].y, traces[mark].x, strict=True)) for mark in MARKS}
    assert marks == {"self": [("1 ·does", "1 ·does")], "first": [("2 ·it", "0 What")], "other": [("3 ·do", "1 ·does")]}
    assert len({style.colour for style in MARKS.values()}) == len({style.symbol for style in MARKS.values()}) == 3


def test_marks_agree_with_a_loop_over_rows(view: ScoreNumbers) -> None:
    for scores in view.scores.reshape(-1, 7, 7):
        expected = [-1] + [max(range(row + 1), key=lambda key, row=row: scores[row, key]) for row in range(1, 7)]
        assert highest_key(scores).tolist() == expected


def test_row_0_of_a_bidirectional_model_has_a_choice_and_counts_itself_before_the_first_token() -> None:
    traces = by_meta(attention_map(np.array([[2.0, 1.0], [0.0, 1.0]]), ["a", "b"]))
    assert list(traces["self"].y) == ["0 a", "1 b"]
    assert list(traces["first"].y) == []


def test_the_frame_is_drawn_around_the_row_asked_for() -> None:
    assert not attention_map(SCORES, TOKENS).layout.shapes
    (frame,) = attention_map(SCORES, TOKENS, outlined=2).layout.shapes
    assert (frame.y0, frame.y1) == (1.5, 2.5)


def test_the_triangle_holds_the_shares_by_where_the_key_stands() -> None:
    traces = by_meta(of_one(triangle_chart, SHARES, KEYS, TOKENS))
    corners = {mark: [list(traces[mark][corner]) for corner in "abc"] for mark in MARKS}
    assert corners == {"self": [[0.1], [0.2], [0.7]], "first": [[0.6], [0.3], [0.1]], "other": [[0.25], [0.5], [0.25]]}
    assert list(traces["other"].customdata[0]) == ["3 ·do", "1 ·does"]


def test_a_term_that_the_model_lacks_has_share_0_and_its_corner_says_so() -> None:
    shares = {name: share for name, share in SHARES.items() if name != "position"}
    figure = of_one(triangle_chart, shares, KEYS, TOKENS)
    assert all(value == 0 for trace in figure.data for value in trace.a)
    assert "not in this model" in figure.layout.ternary.aaxis.title.text
    assert "not in this model" not in figure.layout.ternary.baxis.title.text


def test_bars_hold_every_share_in_one_order() -> None:
    figure = of_one(bars_chart, SHARES | {"softcap": np.zeros(4)}, KEYS, TOKENS)
    assert [trace.meta for trace in figure.data] == [*TERMS, "softcap"]
    for name, share in SHARES.items():
        np.testing.assert_array_equal(by_meta(figure)[name].x, share)
    assert list(figure.data[0].y) == LABELS
    assert list(figure.data[0].customdata) == ["0 What", "1 ·does", "0 What", "1 ·does"]


def test_rows_without_a_key_of_this_rank_are_left_out() -> None:
    keys, shares = np.array([-1, -1, 1, 2]), {"query_key": np.array([NAN, NAN, 1.0, 1.0])}
    assert [len(trace.a) for trace in of_one(triangle_chart, shares, keys, TOKENS).data] == [0, 0, 2]
    assert list(of_one(bars_chart, shares, keys, TOKENS).data[0].customdata) == ["", "", "1 ·does", "2 ·it"]


def test_both_halves_of_figure_2_stand_in_one_figure() -> None:
    shares = {name: share[None, None, :, None].repeat(3, axis=3) for name, share in SHARES.items()}
    keys = KEYS[None, None, :, None].repeat(3, axis=3)
    figure = score_shares_chart(shares, keys, TOKENS).figure(layer=0, head=0, rank=2)
    halves = of_one(triangle_chart, SHARES, KEYS, TOKENS).data + of_one(bars_chart, SHARES, KEYS, TOKENS).data
    assert [(trace.type, trace.meta) for trace in figure.data] == [(trace.type, trace.meta) for trace in halves]
    assert figure.layout.legend.title.text == "the key of rank 2 is"


def test_key_terms_are_shown_minus_their_mean() -> None:
    terms = {"position": np.array([0.0, 1.0, 2.0, 5.0]), "key_bias": np.array([3.0, 3.0, 3.0, 7.0])}
    traces = by_meta(key_terms(terms))
    assert traces["position"].y.tolist() == [-2, -1, 0, 3]
    assert traces["key_bias"].y.tolist() == [-1, -1, -1, 3]
    without = key_terms({})
    assert not without.data and "depends on the key alone" in without.layout.annotations[0].text


def test_every_figure_escapes_the_tokens(view: ScoreNumbers) -> None:
    for figure in (
        attention_map(view.scores[0, 0], view.tokens),
        score_shares_chart(view.ranked_share, view.ranked_key, view.tokens).figure(layer=0, head=0, rank=0),
        key_terms_chart(view.key_terms, view.tokens).figure(layer=0, head=0),
    ):
        written = figure.to_json()
        assert not any(tag in written for tag in ("<img", "<a ", "u003cimg"))
        assert "img" in written


def test_tokens_of_another_text_are_refused() -> None:
    with pytest.raises(InputError, match="one entry for each of the 3 tokens; got 4"):
        attention_map(SCORES, TOKENS[:3])
