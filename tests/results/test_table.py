"""Tables, intervals, tests, orders and maps of every kind of result equal loops over its texts."""

import math
from typing import Any, Final

import maps
import naive
import numpy as np
import pytest
import torch
from kinds import KINDS, result
from scipy.stats import binomtest

HEADS: Final = ("layer", "head")
METRIC: Final = ("before", "after", "texts")
TABLES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "focus": (HEADS, ("collapse",)),
    "focus of a corpus": (HEADS, ("collapse",)),
    "blocks": (("layer",), ()),
    "ablation": (HEADS, METRIC),
    "draws": (HEADS, (*METRIC, "draw_spread")),
    "patching heads": (HEADS, (*METRIC, "clean")),
    "patching positions": (("layer", "position"), (*METRIC, "clean")),
    "kv heads": (("layer", "kv_head"), (*METRIC, "clean")),
    "edges": (("sender", "receiver"), ("exact",)),
    "importance": (HEADS, ("normalised",)),
    "null": (HEADS, ("texts_needed", "verdict")),
    "pairs": (("layer", "head", "other_layer", "other_head"), ("texts",)),
    "sweep": (("intervention",), (*METRIC, "rows_without_keys")),
    "paths": (HEADS, METRIC),
    "pruning": (("removed", *HEADS), ("after", "random", "random_least", "random_most")),
    "doses": (("factor",), ()),
    "circuits": (("size", "share"), ()),
}
"""The first and the last columns of a table, if they are not those of heads and nothing."""
TESTED: Final = {
    "importance": {"score": ""}, "pairs": {"interaction": ""},
    "null": {name: f"{name}_" for name in ("remove", "zero_value", "mean_value", "only_sink")},
    **{kind: {} for kind in ("focus", "focus of a corpus", "updates", "blocks", "circuits", "variance")},
}  # fmt: skip
"""The statistics that are compared with 0, with the beginning of their columns, if not the effect alone."""
MAPS: Final = ("ablation", "patching heads", "patching positions", "kv heads", "importance", "attribution")
FLAGS: Final = ("agreeing", "clear", "clear_size", "one_text")


def places_of(found: Any, frame: Any, values: torch.Tensor) -> list[tuple[int, ...]]:
    if values.dim() == 1:
        return [(row,) for row in range(len(frame))]
    if list(frame.columns)[1] not in ("head", "kv_head", "position"):
        return [(row, 0) for row in range(len(frame))]
    # An MLP comes after the heads of its layer.
    return list(zip(frame["layer"], frame.iloc[:, 1].fillna(values.shape[1] - 1).astype(int), strict=True))


def of_texts(values: list[float]) -> tuple[int, bool, float]:
    """The number of texts with the sign of the mean, whether one carries it, and the P of the sign test."""
    mean, size = math.fsum(values), [abs(value) for value in values]
    above, below = sum(value > 0 for value in values), sum(value < 0 for value in values)
    p = binomtest(above, above + below).pvalue if above + below else 1.0
    agreeing = above if mean > 0 else below if mean < 0 else 0
    return agreeing, len(values) > 1 and max(size) > sum(size) / 2, float(p)


def by_holm(p: list[float]) -> list[bool]:
    order, found = sorted(range(len(p)), key=p.__getitem__), [False] * len(p)
    for step, place in enumerate(order):
        if p[place] > 0.05 / (len(p) - step):
            break
        found[place] = True
    return found


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_holds_what_loops_over_texts_give(kind: str) -> None:
    found = result(kind, "plain", 24)
    frame = found.to_frame()
    first, last = TABLES.get(kind, (HEADS, ()))
    tested = TESTED.get(kind, {"effect": ""})
    names = [name for name in found.quantities if name in frame]
    expected = list(first)
    for name in names:
        flags = [tested[name] + flag for flag in FLAGS] if name in tested else []
        expected += [name, f"{name}_low", f"{name}_high", *flags]
    assert list(frame.columns) == [*expected, *last]
    for name in names:
        quantity = found[name]
        places = places_of(found, frame, quantity.mean)
        low, high = quantity.interval()
        lower, higher = quantity.simultaneous()
        least, most = found.STATISTICS[name].bounds
        texts = []
        for row, place in enumerate(places):
            above, below = (each[place].tolist() for each in (quantity.every.above, quantity.every.below))
            there = [number for number in range(len(above)) if (above[number], below[number]) != (0.0, 0.0)]
            assert int(quantity.texts[place]) == len(there)
            values = quantity.per_text[place].tolist()
            assert [number for number in range(len(above)) if values[number] == values[number]] == there
            assert [values[number] * below[number] for number in there] == pytest.approx([above[n] for n in there])
            mean = sum(above) / sum(below) if there else math.nan
            for each in (frame[name][row], float(quantity.mean[place])):
                assert each == pytest.approx(mean, rel=1e-9, abs=1e-12, nan_ok=True)
            ends = [math.nan] * 2
            if len(there) >= 5:
                ends = [min(max(end, least), most) for end in naive.t_interval(above, below)]
            now = [frame[f"{name}_low"][row], frame[f"{name}_high"][row]]
            assert now == pytest.approx(ends, rel=1e-6, abs=1e-9, nan_ok=True), (name, place)
            assert now == pytest.approx([float(low[place]), float(high[place])], abs=0, nan_ok=True)
            if len(there) >= 5 and lower[place] == lower[place]:
                assert lower[place] <= low[place] and higher[place] >= high[place]
            texts.append([above[number] for number in there])
        agreeing, one_text, p = zip(*map(of_texts, texts), strict=True)
        measured = [row for row, some in enumerate(texts) if len(some) >= 5]
        rejected = dict(zip(measured, by_holm([p[row] for row in measured]), strict=True))
        above = [sum(value > 0 for value in some) - sum(value < 0 for value in some) for some in texts]
        clear = [rejected.get(row, False) and above[row] * sum(some) > 0 for row, some in enumerate(texts)]
        size = [
            bool((lower[place] > 0) | (higher[place] < 0)) and not one
            for place, one in zip(places, one_text, strict=True)
        ]
        for flag, wanted in zip(FLAGS, (agreeing, clear, size, one_text), strict=True):
            assert [getattr(quantity, flag)[place] for place in places] == list(wanted), (name, flag)
            if name in tested:
                assert list(frame[tested[name] + flag]) == list(wanted)
    main = found[found._MAIN]
    places = places_of(found, frame, main.mean)
    for name in {"before", "after", "clean"} & {*last}:
        measured_values = getattr(found, name)
        of_places = [measured_values[place] if measured_values.dim() > 1 else measured_values for place in places]
        assert frame[name].tolist() == pytest.approx([float(values.nanmean()) for values in of_places])
    for verb in ("interval", "simultaneous"):
        assert all(map(torch.equal, *(map(torch.nan_to_num, getattr(each, verb)()) for each in (found, main))))
    for flag in FLAGS:
        assert torch.equal(getattr(found, flag), getattr(main, flag))


@pytest.mark.parametrize("kind", KINDS)
def test_the_strongest_are_the_clear_ones_then_the_largest(kind: str) -> None:
    found = result(kind, "plain", 24)
    frame, tested = found.to_frame(), TESTED.get(kind, {"effect": ""})
    for name in (name for name in found.quantities if name in frame and frame[name].notna().all()):
        values = frame[name].tolist()
        if name in tested:
            # Estimates are confirmed by size, clear or not.
            clear = frame[tested[name] + "clear"] | (kind in ("attribution", "edges"))
            keys = [(not each, -abs(value)) for each, value in zip(clear, values, strict=True)]
        else:
            keys = [(False, -value) for value in values]
        order = sorted(range(len(frame)), key=keys.__getitem__)[:3]
        strongest = found.strongest(3, None if name == found._MAIN else name)
        assert strongest[name].tolist() == [values[row] for row in order] and strongest.attrs == frame.attrs
        assert len({*keys}) < len(keys) or strongest.iloc[:, 0].tolist() == frame.iloc[order, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_than_five_texts_have_no_intervals(kind: str) -> None:
    found = result(kind, "plain", 4)
    frame = found.to_frame()
    ends = [name for name in frame.columns if name.endswith(("_low", "_high"))]
    assert frame[ends].isna().all(axis=None) and not found.clear.any() and not found.clear_size.any()
    assert all(end.isnan().all() for end in (*found.interval(), *found.simultaneous()))
    assert f"4 {found._SAMPLE}s are too few for an interval, which needs 5 or more" in frame.attrs["intervals"]


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_shows_each_mean_at_its_place(kind: str) -> None:
    found = result(kind, "plain", 24)
    for name in found.quantities:
        shown = maps.shown(found.plot() if name == found._MAIN else found.plot(name))
        np.testing.assert_array_equal(shown, found[name].mean[:, : shown.shape[1]].numpy())
