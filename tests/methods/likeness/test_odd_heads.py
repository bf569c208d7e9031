"""Odd heads: long-range mass against loops, planted heads, and random weights, which have no odd heads."""

import math
from collections.abc import Callable

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from models import texts_of
from scipy.stats import median_abs_deviation
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.maths.outliers import critical_score, robust_scores, spread_of
from attnmech.methods.likeness.odd_heads import STATISTICS


def far_by_hand(model: am.HookedModel, given: list[Tensor], beyond: int, layer: int, head: int) -> list[float]:
    """Long-range mass and its uniform baseline, with and without the first token."""
    found: list[list[float]] = [[], [], [], []]
    for ids in given:
        pattern = model.run(ids, points=["pattern"])["pattern", layer][0, head]
        length = ids.shape[1]
        for row in range(1, length):
            seen = range(row + 1) if model.causal else range(length)
            for place, first in enumerate((0, 1)):
                far = [key for key in seen if abs(row - key) >= beyond and key >= first]
                if far:
                    found[2 * place].append(sum(float(pattern[row, key]) for key in far))
                    found[2 * place + 1].append(len(far) / len(seen))
    return [float(np.mean(each)) for each in found]


@pytest.mark.core
@pytest.mark.parametrize("name", ["bloom", "gpt2", "bert", "gpt_oss"])
def test_long_range_mass_is_that_of_a_loop(name: str) -> None:
    config = {"sliding_window": 30} if name == "gpt_oss" else {}
    model = am.load(models.randomised(models.gpt_oss(**config)) if config else models.fresh(name))
    given = texts_of()
    odd = am.odd_heads(model, given, beyond=4)
    for layer, head in ((0, 0), (1, odd.far_mass.shape[1] - 1)):
        far, uniform, ordinary, ordinary_uniform = far_by_hand(model, given, 4, layer, head)
        assert float(odd.far_mass[layer, head]) == pytest.approx(far, abs=2e-6)
        assert float(odd._uniform(0)[layer]) == pytest.approx(uniform, abs=1e-9)
        assert float(odd.far_ordinary[layer, head]) == pytest.approx(ordinary, abs=2e-6)
        assert float(odd._uniform(1)[layer]) == pytest.approx(ordinary_uniform, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_other_numbers_are_those_of_the_methods_that_measure_them(dtype: torch.dtype) -> None:
    model, given = am.load(models.fresh("llama", dtype)), texts_of()
    odd = am.odd_heads(model, iter(given), layers=[1])
    focus, updates = am.attention_focus(model, iter(given)), am.residual_updates(model, iter(given))
    expected = {"bos_mass": focus.bos_mass, **{name: focus[name].mean for name in ("entropy", "self_mass", "distance")}}
    expected |= {name: updates[name].mean for name in ("magnitude", "orientation")}
    for name, values in expected.items():
        assert torch.allclose(odd[name].mean[1], values[1], atol=1e-6)
        assert bool(odd[name].mean[0].isnan().all())
    assert odd.collapse[1] == focus.collapse[1] and set(odd.collapse[0]) == {"not measured"}


def at_first(head: int, share: float) -> Callable[[Tensor], Tensor]:
    """A head gives the first token a share of its attention."""

    def edited(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, head] *= 1 - share
        pattern[:, head, :, 0] += share
        return pattern

    return edited


def test_planted_heads_are_found_and_ranked() -> None:
    """A dead head, a sink and a head that attends to one key: a head gets the first class that applies."""
    model, given = models.demo(), documents(10)

    def own(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, 5] = 0.04 * pattern[:, 5] + 0.96 * torch.eye(pattern.shape[-1])
        return pattern

    with model.hooks({("pattern", 0): at_first(2, 0.99), ("pattern", 1): own, ("pattern", 2): at_first(1, 0.6)}):
        odd = am.odd_heads(model, given)
    assert (odd.collapse[0][2], odd.collapse[2][1], odd.collapse[1][5]) == ("dead", "sink", "low entropy")
    first = odd.odd.iloc[0]
    assert (first.layer, first["head"], first.reason) == (0, 2, "dead") and first.value == pytest.approx(
        float(odd["bos_mass"].mean[0, 2])
    )
    reasons = list(odd.odd.reason)
    assert reasons == sorted(reasons, key=["dead", "sink", "low entropy", "unusual"].index)
    unusual = odd.odd[odd.odd.reason == "unusual"]
    assert bool((unusual.score.abs() > odd._critical).all())
    assert bool(unusual.score.abs().is_monotonic_decreasing)
    assert {(0, 2, "bos_mass"), (1, 5, "self_mass")} <= set(
        unusual[["layer", "head", "statistic"]].itertuples(index=False, name=None)
    )
    own_row = unusual[(unusual.layer == 1) & (unusual["head"] == 5) & (unusual.statistic == "self_mass")].iloc[0]
    assert bool(own_row.steady) and own_row.value == pytest.approx(0.96, abs=0.02)
    assert "Of 32 heads on 10 texts, 1 is dead, " in odd.lead and "1 has low entropy" in odd.lead


def test_few_texts_are_never_steady() -> None:
    model = models.demo()
    with model.hooks({("pattern", 0): at_first(2, 0.99)}):
        odd = am.odd_heads(model, documents(3))
    unusual = odd.odd[odd.odd.reason == "unusual"]
    assert len(unusual) and not unusual.steady.any() and bool(unusual.low.isna().all())
    assert "3 texts are too few to generalise" in odd.lead


def test_scores_and_their_limit_by_other_means() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=37)
    expected = (values - np.median(values)) / (1.4826 * median_abs_deviation(values))
    assert torch.allclose(robust_scores(torch.from_numpy(values)), torch.from_numpy(expected), atol=1e-12)
    drawn = generator.normal(size=(20_000, 37))
    off = np.abs(drawn - np.median(drawn, axis=1, keepdims=True))
    largest = (off / (1.4826 * np.median(off, axis=1, keepdims=True))).max(axis=1)
    for statistics in (1, 8):
        assert (largest > critical_score(37, statistics)).mean() == pytest.approx(0.05 / statistics, abs=0.004)
    assert spread_of(torch.tensor([2.0, 2.0, 2.0, 2.0, 4.0])) == pytest.approx((2.0, 1.2533 * 0.4))
    assert robust_scores(torch.full((2, 3), 0.5)).tolist() == [[0.0] * 3] * 2
    assert critical_score(2, 8) == math.inf


def test_the_page_shows_the_largest_score_of_a_head() -> None:
    whole = am.odd_heads(models.demo(), documents(6), beyond=9)
    page = whole.to_html()
    assert "Heads unlike the others" in page and "Long-range attention" in page
    shown = torch.stack([whole._robust_score(name) for name in STATISTICS]).nan_to_num(0.0)
    assert float(whole.plot().data[0].z[1][4]) == pytest.approx(
        float(shown[:, 1, 4][shown[:, 1, 4].abs().argmax()]), abs=1e-9
    )


def test_texts_too_short_for_a_long_range() -> None:
    odd = am.odd_heads(am.load(models.fresh("bloom")), texts_of(5, 12), beyond=12)
    assert bool(odd.far_mass.isnan().all() and odd._uniform(0).isnan().all())
    assert "No row sees a key 12 tokens away" in odd.lead
    assert odd.to_html()


@pytest.mark.parametrize(("name", "stack"), [("gpt2", None), ("t5", "encoder")])
def test_texts_of_one_token_have_no_classes(name: str, stack: str | None) -> None:
    odd = am.odd_heads(models.hooked(name), [torch.tensor([3]), torch.tensor([4])], stack=stack)
    assert {kind for layer in odd.collapse for kind in layer} == {"not measured"} and odd.odd.empty
    assert odd.lead == "On 2 texts, no token after the first sees two keys, so how heads attend is not measured."


@pytest.mark.usefixtures("unchecked")
def test_bad_input() -> None:
    refuses("`beyond` must be a whole number, 1 or more", am.odd_heads, models.demo(), documents(3), beyond=0)
    refuses("so they have no distance", am.odd_heads, models.hooked("t5"), models.inputs_of("t5"), stack="cross")
    odd = am.odd_heads(models.demo(), documents(3))
    refuses("`statistic` must be one of", odd.plot, "length")
    refuses(r"one\.far_mass", lambda: odd - odd)


def test_long_range_mass_by_type_is_the_mean_over_its_heads() -> None:
    model = models.demo()
    given = documents(3)
    odd = am.odd_heads(model, given)
    frame = odd.far_by_type({(2, 6): "induction", (2, 7): "induction", (0, 0): "self"}).set_index("type")
    assert frame.heads.to_dict() == {"induction": 2, "self": 1, "": 29}
    assert frame.far_mass["induction"] == pytest.approx(float(odd.far_mass[2, 6:8].mean()))
    assert frame.far_ordinary["self"] == pytest.approx(float(odd.far_ordinary[0, 0]))
    assert frame.far_baseline["self"] == pytest.approx(float(odd._uniform(0)[0]))
    assert odd.far_by_type(am.head_types(model, given).main_types).heads.sum() == 32
