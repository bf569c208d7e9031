"""A chart filled for a selected head equals the figure of that head; slots store, subtract and print their values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnmech.draw.attention_maps import MEASURES, attention_chart, attention_map
from attnmech.draw.chart import ByChoice, Chart, Slot, at_head
from attnmech.draw.figure import Figure
from attnmech.draw.head_maps import effect_map
from attnmech.draw.ledger import REFERENCES, ledger_chart, row_ledger
from attnmech.draw.numbers import FocusNumbers, ScoreNumbers, UpdateNumbers
from attnmech.draw.style import MARKS
from attnmech.draw.text import token_labels
from attnmech.errors import InputError
from attnmech.methods.focus.figures import focus_chart, rank_lines
from attnmech.methods.scores.figures import bars_chart, key_terms_chart, triangle_chart
from attnmech.methods.updates.figures import (
    FADED,
    magnitude_by_position_chart,
    magnitude_histograms_chart,
    of_one_layer,
    orientation_by_magnitude_chart,
    orientation_histograms_chart,
)

from .conftest import by_meta

NAN = np.nan


def assert_same(figure: Any, expected: Any) -> None:
    """Every property of every trace and of the layout, except the range, which only a page fixes."""
    one, other = (each.to_plotly_json() for each in (figure, expected))
    for layout in (one["layout"], other["layout"]):
        for axis in ("xaxis", "yaxis"):
            if layout.get(axis, {}).get("type") == "log":
                layout[axis].pop("range", None)
    np.testing.assert_equal(one, other)


@pytest.mark.parametrize(("layer", "head", "rank"), [(0, 0, 0), (0, 2, 1), (1, 0, 3), (1, 1, 0)])
def test_figures_1_to_3_are_those_of_the_head(view: ScoreNumbers, layer: int, head: int, rank: int) -> None:
    tokens, chosen = view.tokens, {"layer": layer, "head": head, "rank": rank, "query": 4}
    scores, pattern = view.scores[layer, head], view.pattern[layer, head]
    one = np.ix_([layer], [head], range(len(tokens)), [rank])
    shares = {name: share[one] for name, share in view.ranked_share.items()}
    terms = {name: term[[[layer]], [head]] for name, term in view.key_terms.items()}
    for place, measure in enumerate(MEASURES):
        filled = attention_chart(view.scores, view.pattern, tokens=tokens).figure(**chosen, measure=place)
        assert [trace.visible for trace in filled.data[:3]] == [place == other for other in range(3)]
        (drawn, *_) = attention_map(scores, tokens, measure=measure, pattern=pattern).data
        np.testing.assert_allclose(filled.data[place].z, drawn.z, rtol=1e-6)
        assert filled.data[place].colorbar.title.text == drawn.colorbar.title.text
    only = attention_chart(view.scores.astype(float), tokens=tokens, measures=["score"]).figure(**chosen)
    assert_same(only, attention_map(scores, tokens, outlined=4))
    assert_same(
        triangle_chart(view.ranked_share, view.ranked_key, tokens).figure(**chosen),
        triangle_chart(shares, view.ranked_key[one], tokens).figure(layer=0, head=0, rank=0),
    )
    bars = bars_chart(view.ranked_share, view.ranked_key, tokens).figure(**chosen)
    assert_same(bars, bars_chart(shares, view.ranked_key[one], tokens).figure(layer=0, head=0, rank=0, query=4))
    of_head = key_terms_chart(terms, tokens).figure(layer=0, head=0)
    assert_same(key_terms_chart(view.key_terms, tokens).figure(**chosen), of_head)


@pytest.mark.parametrize(("layer", "head", "query"), [(0, 0, 6), (1, 2, 3), (0, 1, 0)])
def test_the_ledger_is_that_of_the_row(view: ScoreNumbers, layer: int, head: int, query: int) -> None:
    terms = {name: np.broadcast_to(term, view.scores.shape)[layer, head, query] for name, term in view.terms.items()}
    score, pattern = view.scores[layer, head, query], view.pattern[layer, head, query]
    chart = ledger_chart(
        {name: term.astype(float) for name, term in view.terms.items()},
        view.scores.astype(float),
        view.pattern.astype(float),
        view.tokens,
    )
    for place, against in enumerate(REFERENCES):
        expected = row_ledger(terms, score, pattern, view.tokens, query=query, against=against)
        assert_same(chart.figure(layer=layer, head=head, query=query, against=place), expected)


def test_terms_against_a_reference_lose_what_the_reference_has(view: ScoreNumbers) -> None:
    query = 5
    terms = {name: np.broadcast_to(term, view.scores.shape)[1, 0, query] for name, term in view.terms.items()}
    score, pattern = view.scores[1, 0, query], view.pattern[1, 0, query]
    order = sorted(range(query + 1), key=lambda key: -pattern[key])
    for against in REFERENCES:
        figure = row_ledger(terms, score, pattern, view.tokens, query=query, against=against)
        for trace in figure.data[:-1]:
            values = {"score": score, **terms}[trace.meta].astype(float)
            mean = sum(values[key] for key in range(query + 1)) / (query + 1)
            less = {"zero": 0.0, "mean": mean, "runner_up": values[order[1]]}[against]
            np.testing.assert_allclose(trace.x, [values[key] - less for key in order], rtol=1e-5, atol=1e-6)
        sums = sum(np.asarray(trace.x) for trace in figure.data[:-2])
        np.testing.assert_allclose(sums, figure.data[-2].x, rtol=1e-4, atol=1e-5)  # the bars still add up to the mark


def test_the_ring_goes_to_the_chosen_head(focus: FocusNumbers) -> None:
    chart = focus_chart(focus, "first_top", [2, 5])
    drawn, expected = chart.figure(layer=1, head=2), rank_lines(focus, "first_top", (5, 2))
    assert (list(drawn.data[-1].x), list(drawn.data[-1].y)) == ([5], list(expected.data[-1].y))
    np.testing.assert_equal(drawn.to_plotly_json()["data"][:-1], expected.to_plotly_json()["data"][:-1])


@pytest.mark.parametrize(("side", "layer", "head"), [("query", 0, 0), ("query", 2, 1), ("target", 1, 2)])
def test_figures_7_to_10_are_those_of_the_layer(updates: UpdateNumbers, side: Any, layer: int, head: int) -> None:
    sides: Any = ("query", "target")
    magnitude, orientation = updates.magnitude, updates.orientation
    attended, tokens = updates.attended, updates.tokens
    chosen = {"side": sides.index(side), "layer": layer, "head": head}
    of_layer = magnitude[chosen["side"], layer], orientation[chosen["side"], layer]
    pairs = [
        (
            magnitude_histograms_chart(magnitude, sides),
            of_one_layer(magnitude_histograms_chart, of_layer[0], side=side, head=head),
        ),
        (
            orientation_histograms_chart(orientation, sides),
            of_one_layer(orientation_histograms_chart, of_layer[1], side=side, head=head),
        ),
        (
            orientation_by_magnitude_chart(magnitude, orientation, sides, attended=attended, tokens=tokens),
            of_one_layer(
                orientation_by_magnitude_chart, *of_layer, attended=attended[layer], tokens=tokens, side=side, head=head
            ),
        ),
        (
            magnitude_by_position_chart(magnitude, sides, attended=attended, tokens=tokens),
            of_one_layer(
                magnitude_by_position_chart, of_layer[0], attended=attended[layer], tokens=tokens, side=side, head=head
            ),
        ),
    ]
    for chart, expected in pairs:
        assert_same(chart.figure(**chosen), expected)


def test_a_map_frames_the_chosen_head_and_knows_its_cells() -> None:
    figure = effect_map(np.ones((2, 3)), np.zeros((2, 3)), np.ones((2, 3)), layers=[4, 6], label="nats")
    chart = at_head(figure, (4, 6), (2, 6))
    assert [list(cell) for cell in chart.template.data[0].customdata[1]] == [[6, 0], [6, 1], [6, 2]]
    (frame,) = chart.figure(layer=1, head=2).layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1, frame.visible) == (1.5, 2.5, 0.5, 1.5, True)
    assert not chart.figure(layer=0, head=2).layout.shapes[0].visible  # layer 2 is not in the map


def test_a_slot_subtracts_by_row_and_keeps_what_is_there() -> None:
    values = ByChoice(np.array([[[1.0, 2.0], [3.0, NAN]]]), ("head",))
    less = ByChoice(np.array([[1.0, 2.0]]), ("head",))
    np.testing.assert_array_equal(Slot("data.0.z", values, less=less).value({"head": 0}), [[0, 1], [1, NAN]])
    numbers, there = ByChoice(np.array([5.0, NAN, 7.0])), ByChoice(np.array([2, -1, 0]))
    assert Slot("data.0.x", numbers, where=there).value({}).tolist() == [5.0, 7.0]
    written = ByChoice(np.array([-0.25, NAN, 2.0]), digits=2)
    assert Slot("data.0.customdata", (numbers, written)).value({})[0] == [5.0, "−0.25"]
    assert Slot("data.0.text", written).value({}) == ["−0.25", None, "+2.00"]


def test_a_choice_that_is_made_already_is_not_followed() -> None:
    values = ByChoice(np.arange(6.0).reshape(2, 3), ("layer", "head"), fixed={"head": 2})
    assert Chart(Figure().add_scatter(meta="a"), (Slot("data.0.x", (values, values)),)).follows == {"layer"}
    assert values.at({"layer": 1, "head": 0}) == 5.0


TOKENS = ["What", " does", " it", " do"]
LABELS = ["0 What", "1 ·does", "2 ·it", "3 ·do"]
# 2 heads × 4 tokens: head 1 has a magnitude of 0 at token 2, and head 0 is undefined at token 3.
MAGNITUDE = np.array([[0.1, 0.2, 0.3, NAN], [0.01, 0.02, 0.0, 0.04]])
ORIENTATION = np.array([[0.5, -0.5, 0.25, NAN], [0.1, 0.2, NAN, 1.0]])
ATTENDED = np.array([[-1, 1, 0, 2], [-1, 0, 1, 3]])


def points(trace: Any) -> list[tuple[float, float]]:
    return list(zip(trace.x.tolist(), trace.y.tolist(), strict=True))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_magnitudes_are_counted_in_twentieths_of_a_decade(scale: float) -> None:
    magnitude = scale * np.exp(np.random.default_rng(3).normal(size=(3, 211)))
    for head, trace in enumerate(of_one_layer(magnitude_histograms_chart, magnitude, side="query").data):
        assert sum(count for count, _, _ in trace.customdata) == 211
        for (count, low, high), middle in zip(trace.customdata, trace.x, strict=True):
            assert count == ((magnitude[head] >= low) & (magnitude[head] < high)).sum()
            assert high / low == pytest.approx(10**0.05)
            assert middle == pytest.approx(np.sqrt(low * high))


def test_orientations_are_counted_in_fortieths_from_end_to_end() -> None:
    orientation = np.array([[-1.0, -0.99, 0.0, 0.024, 0.025, 0.999, 1.0]], dtype=np.float32)
    (trace,) = of_one_layer(orientation_histograms_chart, orientation, side="query").data
    filled = [(count, round(low, 6), round(high, 6)) for count, low, high in trace.customdata if count]
    assert filled == [(2, -1, -0.975), (2, 0, 0.025), (1, 0.025, 0.05), (2, 0.975, 1)]


def test_a_histogram_stands_on_its_head_scaled_to_its_fullest_bin() -> None:
    orientation = np.array([[0.01, 0.01, 0.06, NAN], [0.51, 0.56, 0.61, 0.51]])
    for head, trace in enumerate(of_one_layer(orientation_histograms_chart, orientation, side="query").data):
        counts = np.array([count for count, _, _ in trace.customdata])
        np.testing.assert_allclose(head - trace.y, 0.9 * counts / counts.max())
        assert trace.y[0] == trace.y[-1] == head  # an empty bin at either end closes the outline
    defined = of_one_layer(magnitude_histograms_chart, MAGNITUDE, side="query", head=1).data
    assert [sum(count for count, _, _ in trace.customdata) for trace in defined] == [3, 3]
    assert [trace.opacity for trace in defined] == [FADED, 1]
    (empty,) = of_one_layer(magnitude_histograms_chart, np.array([[0.0, NAN]]), side="query").data
    assert len(empty.x) == len(empty.y) == 0 and empty.opacity == 1


def test_positions_hold_every_defined_magnitude_and_the_chosen_head_has_traces_of_its_own() -> None:
    figure = of_one_layer(
        magnitude_by_position_chart, MAGNITUDE, attended=ATTENDED, tokens=TOKENS, side="query", head=1
    )
    traces = by_meta(figure)
    assert {name: points(traces[f"all {name}"]) for name in (*MARKS, "none")} == {
        "self": [(1, 0.2), (3, 0.04)],
        "first": [(2, 0.3), (1, 0.02)],
        "other": [],
        "none": [(0, 0.1), (0, 0.01)],
    }
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert shown == ["itself", "the first token", "another token", "one visible key"]
    assert points(traces["chosen first"]) == [(1, 0.02)]
    assert traces["chosen self"].marker.size > traces["all self"].marker.size
    assert list(traces).index("all none") < list(traces).index("chosen self")  # the selected head's points are on top


def test_points_agree_with_a_loop(updates: UpdateNumbers) -> None:
    layer, seen = 0, 0
    figure = of_one_layer(
        orientation_by_magnitude_chart,
        updates.magnitude[0, layer],
        updates.orientation[0, layer],
        attended=updates.attended[layer],
        tokens=updates.tokens,
        side="query",
        head=2,
    )
    traces, labels = by_meta(figure), token_labels(updates.tokens)
    for head in range(3):
        for query in range(7):
            key = updates.attended[layer, head, query]
            mark = "none" if key < 0 else "self" if key == query else "first" if key == 0 else "other"
            point = (updates.magnitude[0, layer, head, query], updates.orientation[0, layer, head, query])
            for group in ("all", "chosen")[: 1 + (head == 2)]:
                trace = traces[f"{group} {mark}"]
                assert point in points(trace)
                asked = "one key" if key < 0 else f"highest attention to {labels[key]}"
                assert list(trace.customdata[points(trace).index(point)]) == [head, labels[query], asked]
                seen += 1
    assert sum(len(points(trace)) for name, trace in traces.items() if not name.startswith("legend")) == seen


@pytest.mark.parametrize("side", ["query", "target"])
def test_axes_say_quantity_and_side(side: Any) -> None:
    of_text: dict[str, Any] = {"attended": ATTENDED, "tokens": TOKENS, "side": side}
    x, y = (
        of_one_layer(orientation_by_magnitude_chart, MAGNITUDE, ORIENTATION, **of_text).layout[axis]
        for axis in ("xaxis", "yaxis")
    )
    assert (x.title.text, x.type) == (f"update magnitude ‖u‖ / ‖x‖, {side} side", "log")
    assert y.title.text == f"update orientation cos(u, x), {side} side"
    assert of_one_layer(magnitude_histograms_chart, MAGNITUDE, side=side).layout.xaxis.type == "log"
    assert of_one_layer(magnitude_by_position_chart, MAGNITUDE, **of_text).layout.yaxis.type == "log"
    assert of_one_layer(orientation_histograms_chart, ORIENTATION, side=side).layout.xaxis.type != "log"


def test_tokens_of_another_text_and_unknown_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"the 4 tokens of the text.*got 3"):
        of_one_layer(magnitude_by_position_chart, MAGNITUDE, attended=ATTENDED, tokens=TOKENS[:3], side="query")
    with pytest.raises(InputError, match="`head` must be from 0 to 1"):
        of_one_layer(magnitude_histograms_chart, MAGNITUDE, side="query", head=2)


def test_views_of_wrong_shape_or_range_are_refused(updates: UpdateNumbers) -> None:
    with pytest.raises(ValueError, match=r"`magnitude` must be .* with side=2, layer=3, token=6; got"):
        replace(updates, tokens=updates.tokens[:6])
    with pytest.raises(InputError, match="`orientation` must be finite, or NaN"):
        replace(updates, orientation=np.full((2, 3, 3, 7), np.inf, dtype=np.float32))
