"""Heads that attend alike: divergences against scipy in loops, heads planted by hand, and any way of running texts."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import tiny
import torch
from browser import opening
from comparing import refuses
from models import texts_of
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import jensenshannon, squareform
from scipy.stats import t as student_t
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.maths.divergence import effective_number, jensen_shannon, placed
from attnmech.maths.intervals import TextMeans
from attnmech.methods.likeness import divergences as module
from attnmech.methods.likeness.divergences import OverlapReducer
from attnmech.methods.likeness.redundancy import heads_in_plane

LN2 = math.log(2)


@cache
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    return am.load(tiny.model_of("gpt2") if name == "gpt2" else models.fresh(name, dtype))


def apart(one: Tensor, other: Tensor) -> float:
    """The divergence by scipy, in float64; a sink's share counts as one more key."""
    rows = [np.append(row.double().numpy(), max(0.0, 1 - float(row.double().sum()))) for row in (one, other)]
    return float(jensenshannon(*rows)) ** 2


def by_hand(patterns: Sequence[dict[int, Tensor]], first: tuple[int, int], second: tuple[int, int]) -> float:
    """The mean over the rows of all texts, except the first of each."""
    found = [
        apart(text[first[0]][first[1], query], text[second[0]][second[1], query])
        for text in patterns
        for query in range(1, text[first[0]].shape[1])
    ]
    return float(np.mean(np.nan_to_num(found)))


def patterns_of(model: am.HookedModel, given: Sequence[Tensor]) -> list[dict[int, Tensor]]:
    runs = [model.run(ids, points=["pattern"]) for ids in given]
    return [{layer: acts["pattern", layer][0] for layer in range(model.n_layers)} for acts in runs]


@pytest.mark.core
@pytest.mark.parametrize("name", ["bloom", "llama", "gpt2", "bert", "gpt_oss"])
def test_divergences_are_those_of_a_loop_with_scipy(name: str) -> None:
    model, given = hooked(name), texts_of()
    alike, patterns = am.redundancy(model, given), patterns_of(model, given)
    heads = alike.divergence.shape[1]
    flat = alike.divergence.flatten(2).flatten(0, 1)
    assert torch.equal(flat, flat.T) and bool((flat.diagonal() == 0).all()) and 0 <= float(flat.max()) <= LN2 + 1e-6
    for first in [(0, 0), (1, heads - 1)]:
        for second in [(0, 1), (0, heads - 1), (1, 0), (1, heads - 1)]:
            expected = by_hand(patterns, first, second)
            assert float(alike.divergence[*first, *second]) == pytest.approx(expected, abs=2e-6)
            if first[0] == second[0]:
                assert float(alike.within[first[0], first[1], second[1]]) == pytest.approx(expected, abs=2e-6)


def test_the_smallest_numbers_are_no_distance() -> None:
    smallest = torch.tensor([1.0, 1.4e-45])
    assert float(jensen_shannon(smallest, torch.tensor([1.0, 0.0]))) == pytest.approx(0.0, abs=1e-7)
    assert float(jensen_shannon(smallest, smallest)) == 0.0


def copied(source: int, *copies: int) -> Callable[[Tensor], Tensor]:
    def edited(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, list(copies)] = pattern[:, source : source + 1]
        return pattern

    return edited


def test_copied_heads_are_one_cluster() -> None:
    """Under hooks, the edited model is measured: three heads of layer 1 attend like its head 1."""
    model = hooked("gpt2")
    heads = model.stack("").n_heads
    with model.hooks({("pattern", 1): copied(1, 2, heads - 1)}):
        alike = am.redundancy(model, texts_of())
    plain = am.redundancy(model, texts_of())
    same = [1, 2, heads - 1]
    assert float(alike.within[1][same][:, same].max()) == 0.0
    assert float(plain.within[1, 1, 2]) > 0.001
    assert alike.clusters(1e-9)[0] == tuple((1, head) for head in same)
    assert alike.clusters(1e-9, layer=1)[0] == tuple((1, head) for head in same)
    assert all(len(each) == 1 for each in plain.clusters(1e-9))
    assert torch.equal(alike.divergence[0, :, 0], plain.divergence[0, :, 0])
    first = alike.nearest.iloc[0]
    assert (first.layer, first["head"], first.nearest_layer, first.nearest_head, first.divergence) == (1, 1, 1, 2, 0.0)
    points = alike.positions(layer=1)[same]
    assert torch.allclose(points, points[:1].expand_as(points), atol=1e-6)
    with model.hooks({("pattern", 1): copied(0, *range(1, heads))}):
        collapsed = am.redundancy(model, texts_of(), layers=[1])
    assert float(collapsed.effective_heads[1]) == pytest.approx(1.0, abs=1e-9)
    assert bool(collapsed.effective_heads[[0, 2]].isnan().all())


def test_effective_number_and_plane_by_hand() -> None:
    different = torch.full((4, 4), LN2, dtype=torch.float64).fill_diagonal_(0.0)
    assert float(effective_number(different)) == pytest.approx(4.0)
    assert float(effective_number(torch.zeros(4, 4))) == pytest.approx(1.0)
    two_of_one = different.clone()
    two_of_one[0, 1] = two_of_one[1, 0] = 0.0
    shares = np.array([0.5, 0.25, 0.25])
    assert float(effective_number(two_of_one)) == pytest.approx(float(np.exp(-(shares * np.log(shares)).sum())))
    assert bool(effective_number(torch.full((2, 2), torch.nan)).isnan())
    plane = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, share = placed(torch.cdist(plane, plane) ** 2)
    assert share == pytest.approx(1.0)
    assert torch.allclose(torch.cdist(points, points), torch.cdist(plane, plane), atol=1e-7)
    assert placed(torch.zeros(3, 3))[0].tolist() == [[0.0, 0.0]] * 3
    assert placed(torch.zeros(1, 1))[0].shape == (1, 2)


def test_clusters_are_those_of_average_linkage() -> None:
    alike = am.redundancy(hooked("gpt2"), texts_of())
    flat = alike.divergence.flatten(2).flatten(0, 1).numpy()
    joined, heads = linkage(squareform(flat), method="average"), alike.divergence.shape[1]
    for threshold in np.quantile(squareform(flat), (0.1, 0.4, 0.6)):
        labels = fcluster(joined, threshold, criterion="distance")
        expected = {tuple(divmod(int(n), heads) for n in np.flatnonzero(labels == label)) for label in set(labels)}
        found = alike.clusters(float(threshold))
        assert set(found) == expected and sorted(found, key=lambda each: (-len(each), each)) == list(found)
    assert len(alike.clusters(1.0)) == 1


def same(one: am.results.Redundancy, other: am.results.Redundancy) -> None:
    assert torch.allclose(one.divergence, other.divergence, atol=1e-6, equal_nan=True)
    for end, its in zip(
        (*one.interval(), *one.simultaneous()), (*other.interval(), *other.simultaneous()), strict=True
    ):
        assert torch.allclose(end, its, atol=1e-5, equal_nan=True)


def test_sampled_rows_depend_on_the_seed_and_are_rows_of_the_text() -> None:
    model, given = hooked("bloom"), texts_of(3)
    one, other = (am.redundancy(model, given, rows=4, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.divergence[0, :, 1], other.divergence[0, :, 1])
    assert torch.equal(one.within, other.within)
    patterns = patterns_of(model, given)
    ordinary = torch.ones(3, given[0].shape[1], dtype=torch.bool)
    ordinary[:, 0] = False
    for row, ids in enumerate(given):
        ordinary[row, ids.shape[1] :] = False
    digests = torch.cat([model.encode(ids).digests for ids in given])
    chosen = module.sampled_rows(ordinary, digests, 4, 0)
    assert bool((chosen >= 1).all()) and all(len(set(row.tolist())) == 4 for row in chosen)
    assert chosen[0].tolist() != chosen[1].tolist()
    alone = module.sampled_rows(ordinary[1:2].expand(1, -1), digests[1:2], 4, 0)
    assert torch.equal(alone, chosen[1:2])
    expected = np.mean(
        [apart(text[0][1, row], text[1][2, row]) for text, rows in zip(patterns, chosen, strict=True) for row in rows]
    )
    assert float(one.divergence[0, 1, 1, 2]) == pytest.approx(float(expected), abs=2e-6)


# BERT counts positions from the padding on the left, so its patterns differ there.
def test_intervals_between_layers_are_those_over_texts() -> None:
    """Texts of different lengths with every row sampled: the ratio and its jackknife, by a loop."""
    model, given = hooked("bloom"), texts_of(7)
    alike, patterns = am.redundancy(model, given), patterns_of(model, given)
    for first, second in (((0, 1), (1, 2)), ((1, 0), (0, 2)), ((0, 1), (0, 2))):
        sizes = np.array([ids.shape[1] - 1.0 for ids in given])
        sums = sizes * [by_hand([each], first, second) for each in patterns]
        mean, n = sums.sum() / sizes.sum(), len(given)
        left_out = [(sums[t] - mean * sizes[t]) / (sizes.sum() - sizes[t]) for t in range(n)]
        error = math.sqrt((n - 1) / n * sum(each**2 for each in left_out))
        half = student_t.ppf(0.975, sizes.sum() ** 2 / (sizes**2).sum() - 1) * error
        low, high = (float(end[*first, *second]) for end in alike["divergence"].interval())
        assert (low, high) == pytest.approx((max(0.0, mean - half), min(LN2, mean + half)), abs=2e-6)
        wide_low, wide_high = (float(end[*second, *first]) for end in alike["divergence"].simultaneous())
        assert wide_low <= low + 1e-12 and high <= wide_high + 1e-12
    simultaneous = alike["divergence"].simultaneous()
    for ends, within in ((alike["divergence"].interval(), alike.interval()), (simultaneous, alike.simultaneous())):
        for end, of_layer in zip(ends, within, strict=True):
            if ends is not simultaneous:
                assert torch.equal(end[1, :, 1], of_layer[1])
            assert end.shape == alike.divergence.shape
            assert torch.equal(end, end.permute(2, 3, 0, 1))
    few = am.redundancy(model, given[:4])
    assert bool(few["divergence"].interval()[0][0, 1, 1].isnan().all()) and bool(few.nearest.low.isna().all())


def test_simultaneous_intervals_hold_for_all_pairs_at_once() -> None:
    """The family is every pair of heads in any layers: the intervals equal those of all pairs together."""
    alike = am.redundancy(hooked("bloom"), texts_of(8), rows=6)
    layers, heads = alike.divergence.shape[:2]
    state, above, below = alike.state, [], []
    for layer in range(layers):
        for pair in range(heads * (heads - 1) // 2):
            above.append(state["within"][layer, pair])
            below.append(state["counts"][layer])
    for head in range(heads):
        for other in range(heads):
            above.append(state["between"][0, head, other])
            below.append(state["sampled"][0])
    low, high = TextMeans.of_ratio(torch.stack(above), torch.stack(below)).simultaneous()
    ends = alike["divergence"].simultaneous()
    assert float(ends[0][0, 2, 1, 1]) == pytest.approx(max(0.0, float(low[-heads + 1])), abs=1e-12)
    assert float(ends[1][1, 1, 0, 2]) == pytest.approx(float(high[-heads + 1]), abs=1e-12)
    row = alike.nearest.iloc[0]
    place = tuple(int(row[name]) for name in ("layer", "head", "nearest_layer", "nearest_head"))
    assert (row.low, row.high) == pytest.approx(tuple(float(end[place]) for end in ends))


def test_sums_between_layers_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory allows only few groups, texts share groups; the means are the same, and shards merge."""
    model, given = hooked("bloom"), [ids[:, : 5 + number % 7] for number in range(6) for ids in texts_of(7)]
    whole = am.redundancy(model, iter(given), rows=4)
    pairs = 3 * 3
    monkeypatch.setattr(module, "SUMS_BYTES", 8 * pairs * 19)
    small = am.redundancy(model, iter(given), rows=4)
    groups = small.state["between"].shape[-1]
    assert 19 / 2 < groups == small.state["within"].shape[-1] <= 19 < whole.state["between"].shape[-1]
    assert torch.allclose(small.divergence, whole.divergence, atol=1e-12)
    parts = [am.redundancy(model, iter(given), rows=4, shard=(part, 2)) for part in range(2)]
    same(small, parts[1].merged(parts[0]))
    same(small, am.redundancy(model, given, rows=4))
    monkeypatch.setattr(module, "SUMS_BYTES", 8 * pairs * 7)
    refuses(r"9 pairs of heads of different layers are too many .* rows=0", am.redundancy, model, given)
    assert not bool(am.redundancy(model, given, rows=0).within.isnan().any())


@pytest.mark.parametrize(("width", "count"), [(500, 144), (1100, 30)])
def test_names_in_the_map_do_not_overlap(width: int, count: int, chromium: Any, tmp_path: Path) -> None:
    points, places = np.random.default_rng(0).normal(size=(count, 2)), [divmod(number, 12) for number in range(count)]
    html = heads_in_plane(points, places, ["none"] * count, 1.0).to_html(include_plotlyjs=True)
    with opening(chromium, html, tmp_path / "map.html", width=width, ready=".textpoint text") as page:
        ends = "one => ['left', 'top', 'right', 'bottom'].map(end => one.getBoundingClientRect()[end])"
        boxes = np.array(page.eval_on_selector_all(".textpoint text", f"all => all.map({ends})"))
    left, top, right, bottom = boxes[boxes[:, 2] > boxes[:, 0]].T
    apart = (left[:, None] >= right) | (top[:, None] >= bottom)
    assert len(left) > 20 and bool((apart | apart.T | np.eye(len(left), dtype=bool)).all())


def test_the_demo_models_heads() -> None:
    alike = am.redundancy(models.demo(), documents(8))
    assert "layer 0 has the fewest effective heads, 2.3 of 8" in alike.lead
    assert "L0H3 and L0H4" in alike.lead and ", 95 % interval, corrected for 112 pairs: " in alike.lead
    frame = alike.to_frame()
    assert len(frame) == len(alike.nearest) == 32 and bool(alike.nearest.divergence.is_monotonic_increasing)
    within = alike.nearest[alike.nearest.layer == alike.nearest.nearest_layer]
    assert bool(((within.low <= within.divergence) & (within.divergence <= within.high)).all())
    assert len(alike.plot().data[0].x) == 32 and len(alike.plot("map", layer=2).data[0].x) == 8
    figure = alike.plot("within", layer=2)
    assert float(figure.data[0].z[3][5]) == pytest.approx(float(alike.within[2, 3, 5]))
    assert "L0H4" in alike.plot("within").data[0].text[3][4]
    page = alike.to_html()
    assert "All heads in a plane" in page and "Within a layer" in page


def test_one_layer_and_no_sampled_rows() -> None:
    model, given = hooked("gpt2"), texts_of()
    alone = am.redundancy(model, given, layers=[2])
    assert alone.clusters(1.0) and "across layers" not in alone.lead
    none = am.redundancy(model, given, rows=0)
    assert torch.equal(none.within[2], alone.within[2])
    assert bool(none.divergence[0, :, 1].isnan().all())
    assert none.clusters(1.0, layer=1) and len(none._sections()) == 1
    refuses("pass `layer`", none.clusters, 1.0)
    refuses("pass `layer`", none.plot)


def test_too_many_patterns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = hooked("bloom"), texts_of(4)
    layers, heads = model.n_layers, model.stack("").n_heads
    kept = layers * 4 * heads * (given[0].shape[1] + 1) * 4
    monkeypatch.setattr(module, "KEPT_BYTES", 6 * kept)
    padded = [ids[:, :12] for ids in texts_of(4)]
    am.redundancy(model, given, rows=5)
    refuses(r"8 sampled rows .* Use rows=6, fewer `layers`", am.redundancy, model, given, rows=8)
    am.redundancy(model, given, rows=6)
    am.redundancy(model, given, rows=8, layers=[1])
    am.redundancy(model, padded, rows=6)


def test_bad_input() -> None:
    model, given = hooked("bloom"), texts_of(5)
    alike = am.redundancy(model, given, layers=[1])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: am.redundancy(model, given, rows=-1), "`rows` must be a whole number"),
        (lambda: am.redundancy(model, given, seed=-1), "`seed` must be a whole number"),
        (lambda: am.redundancy(model, given, shard=(0, 2)), "for a corpus"),
        (lambda: alike - alike, r"one\.divergence"),
        (lambda: alike.clusters(0.0), "threshold"),
        (lambda: alike.clusters(0.1, layer=0), "the layers measured"),
        (lambda: alike.plot("heat"), "figure"),
        (lambda: alike.plot("within", layer=0), "the layers measured"),
    ]
    for call, message in calls:
        refuses(message, call)


def test_texts_of_one_token_compare_nothing() -> None:
    alike = am.redundancy(hooked("bloom"), [ids[:, :1] for ids in texts_of(5)])
    assert bool(alike.divergence.isnan().all()) and alike.nearest.empty
    assert "no row sees two keys" in alike.lead
    refuses("Pass longer texts", alike.clusters, 0.1)


@pytest.mark.parametrize("narrow", [0, 1])
def test_rows_that_see_one_key_do_not_count(narrow: int) -> None:
    """In a layer with a window of one token, every head sees only that token."""
    kinds = ["full_attention", "full_attention"]
    kinds[narrow] = "sliding_attention"
    model = am.load(models.randomised(models.gemma2(sliding_window=1, layer_types=kinds)))
    alike, wide = am.redundancy(model, texts_of()), 1 - narrow
    rows = {narrow: 0, wide: sum(ids.shape[1] - 1 for ids in texts_of())}
    assert alike.state["counts"].sum(dim=-1).tolist() == [rows[0], rows[1]]
    assert bool(alike.within[narrow].isnan().all() and alike.divergence[0, :, 1].isnan().all())
    assert alike.effective_heads.isnan().tolist() == [narrow == 0, narrow == 1]
    assert set(alike.nearest.layer) == {wide} and "across layers" not in alike.lead
    assert alike.plot("within", layer=narrow).data and alike.clusters(1.0, layer=wide)
    (overlap,) = am.stream(model, iter(texts_of()), [OverlapReducer()])
    by_layer = overlap.view(2, -1, 2, alike.within.shape[1])
    assert bool(by_layer[narrow].isnan().all()) and not bool(by_layer[wide, 0, wide, 1:].isnan().any())
