"""Directions equal means over plain transformers; steering equals plain hooks that add them."""

import math
import operator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, divergences, logit_differences, point_changed, seen
from comparing import refuses
from scipy.stats import binomtest, t  # type: ignore[import-untyped]
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.steering.mean_difference import (
    difference_interval,
    held_out_scores,
    separated_share,
    share_interval,
)
from attnmech.results import MeanDifference
from attnmech.runs.journal import Journal


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_come_from_the_other_half() -> None:
    one, other = noise(7, 3, 5), noise(6, 3, 5, seed=1)
    for group, found in zip((one, other), held_out_scores(one, other), strict=True):
        for text in range(len(group)):
            others = [part[1 - text % 2 :: 2].mean(dim=0) for part in (one, other)]
            for place in range(3):
                way = others[0][place] - others[1][place]
                middle = (others[0][place] + others[1][place]) / 2
                expected = float((group[text, place] - middle) @ way / way.norm())
                assert float(found[place, text]) == pytest.approx(expected)


def test_shares_and_intervals() -> None:
    one, other = noise(2, 9) + 0.4, noise(2, 6, seed=3) - 0.4
    share, (low, high) = separated_share(one, other), share_interval(one, other, 0.95)
    near, far = difference_interval(one, other, 0.9)
    for place in range(2):
        counts = int((one[place] > 0).sum()), int((other[place] < 0).sum())
        assert float(share[place]) == pytest.approx((counts[0] / 9 + counts[1] / 6) / 2)
        ends = [
            binomtest(count, total).proportion_ci(0.975, "exact") for count, total in zip(counts, (9, 6), strict=True)
        ]
        assert float(low[place]) == pytest.approx((ends[0].low + ends[1].low) / 2)
        assert float(high[place]) == pytest.approx((ends[0].high + ends[1].high) / 2)
        # Welch's t of as many texts as a half has: both halves err to the same side.
        parts = [float(group[place].var()) / (len(group[place]) / 2) for group in (one, other)]
        freedom = sum(parts) ** 2 / (parts[0] ** 2 / (9 / 2 - 1) + parts[1] ** 2 / (6 / 2 - 1))
        difference, half = float(one[place].mean() - other[place].mean()), t.ppf(0.95, freedom) * sum(parts) ** 0.5
        assert (float(near[place]), float(far[place])) == pytest.approx((difference - half, difference + half))
    sure = share_interval(torch.ones(1, 4), -torch.ones(1, 4), 0.95)
    assert float(sure[1]) == 1 and float(sure[0]) == pytest.approx(0.0125 ** (1 / 4))


def by_hand(plain: Any, ids: Tensor, layer: int, pooling: str) -> Tensor:
    """The output of a block at the last token, or its mean over tokens, on one text."""
    stream = seen(plain, ids[None], "resid_post", layer)[0]
    return stream[-1] if pooling == "last" else stream.mean(dim=0)


@pytest.mark.core
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_directions_equal_means_on_the_raw_model(family: str, pooling: str) -> None:
    plain, hooked = models.plain(family), models.hooked(family)
    texts = [models.token_ids(family, batch=1, length=length, seed=length)[0] for length in (3, 7, 5, 4, 6, 8, 9, 5, 3)]
    texts[-1] = texts[-1].flip(0)
    found = am.mean_difference(hooked, texts[:5], iter(texts[5:]), pooling=pooling, layers=[1, 0])
    assert found.layers == (1, 0)
    for place, layer in enumerate((1, 0)):
        one, other = (
            torch.stack([by_hand(plain, text, layer, pooling) for text in group]) for group in (texts[:5], texts[5:])
        )
        torch.testing.assert_close(found.direction[place], one.mean(0) - other.mean(0), rtol=1e-4, atol=1e-5)
        # Scores are those of the texts sorted by their digests, those of both groups first.
        digests = [[int(hooked.encode(text).digests[0]) for text in group] for group in (texts[:5], texts[5:])]
        orders = []
        for mine, theirs in (digests, digests[::-1]):
            keys = [(digest not in theirs, digest) for digest in mine]
            orders.append(sorted(range(len(mine)), key=keys.__getitem__))
        scores = held_out_scores(one[orders[0]], other[orders[1]])[0].tolist()
        assert sorted(found.one[place].tolist()) == pytest.approx(sorted(scores), rel=1e-3, abs=1e-4)
    same = am.mean_difference(hooked, texts[:5][::-1], texts[5:], pooling=pooling, layers=[1, 0])
    torch.testing.assert_close(same.one, found.one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.values.by_layer[1][0, 0], found.direction[0])


def test_heads_have_directions_of_their_own() -> None:
    hooked = models.hooked("llama")
    one, other = (list(models.token_ids("llama", batch=6, seed=seed)) for seed in (1, 2))
    found = am.mean_difference(hooked, one, other, at="z")
    acts = [torch.stack([hooked.run(text[None], ["z"])["z", 1][0, -1] for text in group]) for group in (one, other)]
    torch.testing.assert_close(found.direction[1], acts[0].mean(0) - acts[1].mean(0), rtol=1e-4, atol=1e-5)
    assert found.direction.shape == (2, 6, hooked.output_stack.d_value) and found.separated.shape == (2, 6)
    assert list(found.to_frame()["head"]) == [*range(6)] * 2 and "of L" in found.lead and "H" in found.lead
    assert found.plot().data[0].z.shape == (2, 6)


@pytest.mark.parametrize(("texts", "others", "width"), [(4, 4, 24), (6, 11, 24), (20, 20, 3)])
def test_distances_of_groups_of_one_kind_are_not_claimed(texts: int, others: int, width: int) -> None:
    draws = 2000
    scores = held_out_scores(noise(texts, draws, width, seed=11), noise(others, draws, width, seed=12))
    low, high = difference_interval(*scores, 0.95)
    at_most = 0.05 * draws + 2.33 * (0.05 * 0.95 * draws) ** 0.5
    assert int(((low > 0) | (high < 0)).sum()) <= at_most
    assert int((share_interval(*scores, 0.95)[0] > 0.5).sum()) <= at_most


def test_ties_count_half_and_copies_once() -> None:
    hooked = models.hooked("gpt2")
    one, other = (list(models.token_ids("gpt2", batch=4, length=6, seed=seed)) for seed in (5, 6))
    ended = [[torch.cat((text, torch.tensor([9]))) for text in group] for group in (one, other)]
    found = am.mean_difference(hooked, *ended, at="resid_pre", layers=[0])
    assert found.separated.tolist() == [0.5] and found.distance.tolist() == [0.0]
    low, high = found.separated_interval()
    assert float(low) < 0.5 < float(high)
    once, twice = am.mean_difference(hooked, one, other), am.mean_difference(hooked, [*one, *one[1:]], [*other] * 3)
    torch.testing.assert_close(twice.direction, once.direction, rtol=1e-4, atol=1e-5)
    assert torch.allclose(twice.one, once.one, rtol=1e-3, atol=1e-4) and "7 and 12 texts (4 and 4 dis" in twice.lead
    with pytest.raises(InputError, match=r"4 different texts, two in each half; got 9 texts \(3 distinct\)"):
        am.mean_difference(hooked, one[:3] * 3, other)


def test_texts_of_both_groups_separate_nothing() -> None:
    """Texts drawn for both groups from one pool, with copies: as often claimed as the corrected level says."""
    hooked, claimed = models.hooked("gpt2"), 0
    pool = list(models.token_ids("gpt2", batch=12, length=5, seed=31))
    for seed in range(30):
        drawn = torch.randint(12, (2, 14), generator=torch.Generator().manual_seed(1000 + seed)).tolist()
        found = am.mean_difference(hooked, *([pool[number] for number in group] for group in drawn))
        low, _ = found.separated_interval(1 - 0.05 / 3)
        near, far = found.interval(1 - 0.05 / 3)
        claimed += bool((low > 0.5).any()) or bool(((near > 0) | (far < 0)).any())
    assert claimed <= 4  # P(more than 4 of 30 at 5 %) < 0.02


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox", "bloom"])
def test_adding_a_direction_equals_adding_it_by_a_plain_hook(family: str) -> None:
    plain, hooked, ids = models.plain(family), models.hooked(family), models.token_ids(family)
    direction = noise(plain.config.hidden_size, seed=4).float()
    found = am.steer(
        hooked, direction, ids, at="resid_pre", layers=[1], factors=[0, -2, 0.5], metric="logit_difference",
        side_inputs=models.token_ids(family, seed=9), **JUDGED,
    )  # fmt: skip
    with torch.no_grad():
        clean, others = plain(ids).logits, plain(models.token_ids(family, seed=9)).logits
        for place, factor in enumerate((0.0, -2.0, 0.5)):

            def added(stream: Tensor, factor: float = factor) -> Tensor:
                return stream + factor * direction

            with point_changed(plain, "resid_pre", 1, added):
                now, moved = plain(ids).logits, plain(models.token_ids(family, seed=9)).logits
            change = logit_differences(now, ANSWERS, AGAINST) - logit_differences(clean, ANSWERS, AGAINST)
            torch.testing.assert_close(found.per_text[place], change, rtol=1e-4, atol=1e-4)
            assert found.side is not None
            torch.testing.assert_close(found.side[place], divergences(moved, others, [7] * 3), rtol=1e-3, atol=1e-5)
    assert torch.equal(found.per_text[0], torch.zeros(3, dtype=torch.float64))
    assert found.side is not None and torch.equal(found.side[0], torch.zeros(3, dtype=torch.float64))
    assert am.steer(hooked, {0: direction}, ids, factors=[1]).what == "given values added to resid_post of L0"


@pytest.mark.parametrize(
    ("positions", "rows", "where"),
    [(None, slice(None), ""), ("last", [-1], " at the last position"), ([-1, 0], [-1, 0], " at positions 0, -1")],
)
def test_directions_of_heads_are_added_to_these_heads(positions: Any, rows: Any, where: str) -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    values = {1: noise(1, 1, hooked.n_heads, hooked.output_stack.d_value).float()}
    found = am.steer(hooked, values, ids, at="z", heads=[(1, 4)], factors=[3.0], positions=positions, metric="loss")

    def added(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, rows, 4] += 3 * values[1][0, 0, 4]
        return z

    with hooked.hooks({("z", 1): added}):
        after = hooked.loss(ids)
    torch.testing.assert_close(found.per_text[0], after.double() - hooked.loss(ids).double(), rtol=1e-4, atol=1e-5)
    assert found.what == f"given values added to z of L1H4{where}"


def demo_direction() -> tuple[MeanDifference, list[str], list[str]]:
    names = ("Anna", "Tom", "Mia", "Leo", "Nina", "Max", "Eva", "Ben")
    one, other = ([f"{name} {verb}" for name in names] for verb in ("met the", "lost an"))
    return am.mean_difference(models.demo(), one, other), one, other


def test_what_results_say_and_draw() -> None:
    direction, one, other = demo_direction()
    assert direction.lead.startswith(
        "On 8 and 8 texts, the mean difference at resid_post of L0 separates 1.00 of held-out"
    )
    assert "corrected for 4 layers" in direction.lead and direction.lead.endswith("; 0.5 is chance.")
    assert list(direction.to_frame()["layer"]) == [0, 1, 2, 3]
    assert list(direction.plot().data[0].y) == list(direction.to_frame()["separated"])
    assert "0.5 is chance" in direction.to_html()
    doses = am.steer(models.demo(), direction, other, layers=[2], factors=[0, 1, 4], metric="kl", side_inputs=one)
    assert doses.what == "a mean difference added to resid_post of L2" and doses.factors == (0.0, 1.0, 4.0)
    assert doses.lead.startswith("A mean difference added to resid_post of L2, on 8 texts: ")
    assert "other texts move by" in doses.lead and "nats (KL divergence)" in doses.lead
    frame = doses.to_frame()
    assert list(frame["factor"]) == [0, 1, 4] and frame["side_effect_low"].notna().all()
    effect, side = doses.plot().data
    assert list(effect.y) == list(frame["effect"]) and list(side.y) == list(frame["side_effect"]) and side.yaxis == "y2"
    assert "Dotted: how far the output moves" in doses.to_html()
    alone = am.steer(models.demo(), direction, other, layers=[2], factors=[1], metric="kl")
    assert bool(alone.side_effect.isnan().all()) and "side_effect" not in alone.to_frame()
    assert "other texts" not in alone.lead
    for result in (direction, doses):
        refuses("subtract their", operator.sub, result, result)


def test_an_interrupted_sweep_of_doses_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the sweep of the texts, then in that of the side texts; another run is refused in between."""
    direction, one, other = demo_direction()
    journal, written = tmp_path / "doses.journal", Journal.write

    def steered(by: Any = direction, factors: Any = (1, 2), side: Any = one, **options: Any) -> am.results.Steering:
        return am.steer(
            models.demo(), by, other, at="resid_post", layers=[1], factors=factors, metric="kl", side_inputs=side,
            **options,
        )  # fmt: skip

    def interrupted(file: Journal, entry: Any) -> None:
        written(file, entry)
        if file.path.name == stops_at:
            raise KeyboardInterrupt

    whole, another = steered(), {1: torch.ones(1, 1, models.demo().d_model)}
    for stops_at in ("doses.journal", "doses.journal.side"):
        monkeypatch.setattr(Journal, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steered(journal=journal)
        monkeypatch.setattr(Journal, "write", written)
        assert (tmp_path / stops_at).exists()
        changes: list[dict[str, Any]] = [{"by": another}, {"factors": (1, 3)}, {"side": one[:-1]}, {"side": None}]
        for changed in changes:
            refuses("is the journal of another run", steered, journal=journal, **changed, error=am.errors.JournalError)
    resumed = steered(journal=journal)
    assert torch.equal(resumed.per_text, whole.per_text) and resumed.side is not None and whole.side is not None
    assert torch.equal(resumed.side, whole.side) and not list(tmp_path.iterdir())


TEXTS = ["Anna sang.", "Tom sang.", "Anna met Tom.", "Tom met Anna."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"one": ["a", "b", "c"]}, "`one` must have at least 4 different texts, two in each half; got 3"),
        ({"at": "scores"}, "`at` must be one of resid_pre"),
        ({"pooling": "first"}, "`pooling` must be"),
        ({"layers": [4]}, "4"),
        ({"model": "t5"}, "a direction belongs to one stack"),
        ({"factors": []}, "`factors` must name at least one number other than 0"),
        ({"factors": [0]}, "`factors` must name at least one number other than 0"),
        ({"factors": [math.nan]}, "`factors` must be a finite number|factors"),
        ({"factors": [1], "layers": [5]}, "there are values for layers|5"),
        ({"direction": {1: torch.ones(1, 1, 8, 24)}, "at": "z", "layers": [1]}, "at 'z', choose `heads`"),
        ({"direction": {1: torch.ones(1, 1, 7)}}, r"d_model=192\]; those for layer 1 are \[1, 1, 7\]"),
        ({"direction": {1: torch.full((1, 1, 192), torch.nan)}}, "must be finite"),
        ({"direction": torch.ones(192)}, r"one tensor needs `layers=\[3\]`"),
        ({"direction": TEXTS}, "values must be tensors by layer"),
        ({"direction": torch.ones(192), "heads": [(1, 2)], "at": None}, "only whole layers elsewhere; got heads"),
        ({"direction": {1: torch.ones(1, 1, 24)}, "model": "t5"}, r"use am\.sweep with am\.Intervention\.add"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    """Of directions, and of steering by ones."""
    model = models.hooked(options["model"]) if "model" in options else models.demo()
    given = {name: value for name, value in options.items() if name != "model"}
    call, usual = am.mean_difference, {"one": TEXTS, "other": TEXTS}
    if {"factors", "direction"} & options.keys():
        direction = {1: torch.ones(1, 1, model.d_model)}
        call, usual = am.steer, {"direction": direction, "inputs": TEXTS[:1], "at": "resid_post", "metric": "kl"}
    refuses(message, call, model, **{**usual, **given})
