"""Figures 7 to 10 count every token once, put every point at its numbers, and leave out undefined points."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnmech.draw.numbers import UpdateNumbers
from attnmech.draw.style import MARKS
from attnmech.draw.text import token_labels
from attnmech.errors import InputError
from attnmech.methods.updates.figures import (
    FADED,
    magnitude_by_position_chart,
    magnitude_histograms_chart,
    of_one_layer,
    orientation_by_magnitude_chart,
    orientation_histograms_chart,
)

NAN = np.nan
TOKENS = ["What", " does", " it", " do"]
LABELS = ["0 What", "1 ·does", "2 ·it", "3 ·do"]
# 2 heads × 4 tokens: head 1 has a magnitude of 0 at token 2, and head 0 is undefined at token 3.
MAGNITUDE = np.array([[0.1, 0.2, 0.3, NAN], [0.01, 0.02, 0.0, 0.04]])
ORIENTATION = np.array([[0.5, -0.5, 0.25, NAN], [0.1, 0.2, NAN, 1.0]])
ATTENDED = np.array([[-1, 1, 0, 2], [-1, 0, 1, 3]])


def by_meta(figure: Any) -> dict[str, Any]:
    return {trace.meta: trace for trace in figure.data}


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
        updates.magnitude[layer],
        updates.orientation[layer],
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
            point = (updates.magnitude[layer, head, query], updates.orientation[layer, head, query])
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


def test_sides_are_told_apart(updates: UpdateNumbers) -> None:
    assert updates.magnitude_of("query") is updates.magnitude
    assert updates.magnitude_of("target") is updates.target_magnitude
    assert updates.orientation_of("query") is updates.orientation
    assert updates.orientation_of("target") is updates.target_orientation


@pytest.mark.usefixtures("unchecked")
def test_arrays_of_fewer_heads_are_refused(updates: UpdateNumbers) -> None:
    with pytest.raises(InputError, match=r"`target_orientation` must have the shape \(3, 3, 7\) .* got \(3, 2, 7\)"):
        replace(updates, target_orientation=updates.orientation[:, :2])


def test_views_of_wrong_shape_or_range_are_refused(updates: UpdateNumbers) -> None:
    with pytest.raises(InputError, match=r"`magnitude` must have the shape \(3, 3, 6\) .* got \(3, 3, 7\)"):
        replace(updates, tokens=updates.tokens[:6])
    with pytest.raises(InputError, match="`orientation` must be finite, or NaN where undefined"):
        replace(updates, orientation=np.full((3, 3, 7), np.inf, dtype=np.float32))
    with pytest.raises(InputError, match=r"`attended` must hold positions from 0 to 6, or -1.*got -1 to 8"):
        replace(updates, attended=updates.attended + np.int32(7) * (updates.attended == 1))
    with pytest.raises(InputError, match="at least one token and one layer"):
        replace(updates, layers=())
