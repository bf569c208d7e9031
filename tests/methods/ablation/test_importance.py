"""Importance equals the formula on the raw model's gradients, and a numerical derivative."""

from typing import Any

import models
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, logit_differences, losses, plan_of, values_and_gradients
from comparing import refuses
from einops import rearrange
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError


def judged(name: str, logits: Tensor, ids: Tensor) -> Tensor:
    if name == "bert":
        return logit_differences(logits, ANSWERS, AGAINST)
    return losses(logits, ids, [ids.shape[1]] * len(ids))


def by_autograd(name: str, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """z and the gradient of each text's metric at z, layer by layer, from torch's autograd on the raw model."""
    plain = models.fresh(name)
    models.in_attention(plain, "eager")
    found = values_and_gradients(plain, ids, lambda logits: judged(name, logits, ids))
    heads = plan_of(plain).n_heads

    def split(value: Tensor) -> Tensor:
        return rearrange(value.detach(), "text position (head d) -> text position head d", head=heads).double()

    return [(split(z), split(gradient)) for z, gradient in zip(found["z"], found["z gradient"], strict=True)]


def spearman(one: list[float], other: list[float]) -> float:
    """1 − 6 Σ d² / (n (n² − 1)), d the difference of ranks; without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "bloom"])
def test_scores_equal_autograd_on_the_raw_model(family: str) -> None:
    hooked, ids = models.hooked(family), models.token_ids(family)
    reference = ids.flip(0).roll(1, dims=1)
    options: Any = {"metric": "logit_difference", **JUDGED} if family == "bert" else {"metric": "loss"}
    michel = am.head_importance(hooked, ids, **options)
    zero = am.head_importance(hooked, ids, method="zero", **options)
    mean = am.head_importance(hooked, ids, method="mean", reference=reference, **options)
    given = am.head_importance(hooked, ids, method="mean", reference=am.mean_z(hooked, reference), **options)
    torch.testing.assert_close(given.per_text, mean.per_text)
    by_position = am.mean_z(hooked, reference, per_position=True)
    placed = am.head_importance(hooked, ids, method="mean", reference=by_position, **options)
    references = by_autograd(family, reference)
    for layer, (z, gradient) in enumerate(by_autograd(family, ids)):
        theirs = references[layer][0]
        for head in range(hooked.n_heads):
            for text in range(3):
                along = [float(z[text, i, head] @ gradient[text, i, head]) for i in range(7)]
                expected = sum(map(abs, along)) / 7
                assert float(michel.per_text[layer, head, text]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
                assert float(zero.per_text[layer, head, text]) == pytest.approx(-sum(along), rel=1e-3, abs=1e-5)
                pooled = theirs[:, :, head].mean(dim=(0, 1))
                moved = sum(float((pooled - z[text, i, head]) @ gradient[text, i, head]) for i in range(7))
                assert float(mean.per_text[layer, head, text]) == pytest.approx(moved, rel=1e-3, abs=1e-5)
                at = theirs[:, :, head].mean(dim=0)
                moved = sum(float((at[i] - z[text, i, head]) @ gradient[text, i, head]) for i in range(7))
                assert float(placed.per_text[layer, head, text]) == pytest.approx(moved, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(michel.before, judged(family, models.plain(family)(ids).logits, ids).detach())
    torch.testing.assert_close(michel.score, michel.per_text.mean(dim=-1))


def test_each_layer_has_norm_1() -> None:
    found = am.head_importance(models.hooked("bloom"), models.token_ids("bloom"))
    assert bool((found.score > 0).all())
    for row, raw in zip(found.normalised, found.score, strict=True):
        norm = sum(float(each) ** 2 for each in raw) ** 0.5
        torch.testing.assert_close(row, raw / norm)


def test_the_decoder_of_t5() -> None:
    hooked = models.hooked("t5")
    given = {"input_ids": models.token_ids("t5"), "decoder_input_ids": models.token_ids("t5", length=5, seed=2)}
    found = am.head_importance(hooked, given, method="zero")
    assert found.score.shape == (3, 4)
    ids, ends = given["decoder_input_ids"], []
    z = hooked.run(given, points=["decoder.z"])["decoder.z", 2]
    for factor in (0.99, 1.01):
        with hooked.intervene(am.Intervention.replace([(2, 3)], {2: z * factor}, stack="decoder")):
            ends.append(losses(hooked.run(given).logits, ids, [5] * 3))
    torch.testing.assert_close(found.per_text[2, 3], (ends[0] - ends[1]) / 0.02, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("method", ["michel", "zero"])
def test_rank_correlation_with_the_sweep(method: str) -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    sweep = am.ablate_heads(hooked, ids)
    found = am.head_importance(hooked, ids, method=method, sweep=sweep)
    effects = sweep.effect.abs() if method == "michel" else sweep.effect
    expected = spearman(found.score.flatten().tolist(), effects.flatten().tolist())
    assert found.rank_correlation == pytest.approx(expected) and (expected > 0.8 or method == "michel")
    assert f"rank correlation {expected:.2f} with the zero sweep of 15 heads" in repr(found)
    chosen = [(0, 3), (2, 0), (2, 1), (2, 4)]
    some = am.head_importance(hooked, ids, method=method, sweep=am.ablate_heads(hooked, ids, chosen))
    places = tuple(torch.tensor(chosen).T)
    assert some.rank_correlation == pytest.approx(spearman(found.score[places].tolist(), effects[places].tolist()))
    assert some.to_frame()["exact"].isna().sum() == 11
    one = am.head_importance(hooked, ids, method=method, sweep=am.ablate_heads(hooked, ids, [(1, 1)]))
    assert one.rank_correlation != one.rank_correlation
    alone = am.head_importance(hooked, ids, method=method)
    assert alone.rank_correlation is None and "not compared with a sweep" in repr(alone)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "taylor"}, "`method` must be one of michel, zero, mean"),
        ({"method": "mean"}, "needs `reference`"),
        ({"metric": "kl"}, "its gradient there is 0"),
        ({"metric": "accuracy", "answers": [3, 4, 5]}, "has no gradient"),
        ({"metric": lambda logits, batch: logits[:, 0].argmax(-1).float()}, "computed from the logits"),
        ({"metric": lambda logits, batch: logits[:, 0, 0] * torch.nan}, "is NaN for text 0"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    refuses(said, am.head_importance, models.hooked("gpt2"), models.token_ids("gpt2"), **options)


def test_means_by_position_must_cover_the_texts() -> None:
    hooked = models.hooked("gpt2")
    short = am.mean_z(hooked, torch.arange(5, 9)[None], per_position=True)
    with pytest.raises(InputError, match=r"the means cover 4 positions, but a text has 7; .*am\.mean_z"):
        am.head_importance(hooked, models.token_ids("gpt2"), method="mean", reference=short)


def test_a_sweep_of_something_else_is_refused() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    other = am.ablate_heads(hooked, ids.flip(0), [(0, 1)])
    refuses("inputs there", am.head_importance, hooked, ids, sweep=other)
    kl = am.ablate_heads(hooked, ids, [(0, 1)], metric="kl")
    refuses("metric there: kl, here: loss", am.head_importance, hooked, ids, sweep=kl)
    with pytest.raises(InputError, match=r"no head in layers \[2\]; it covers layers \[0\]"):
        am.head_importance(hooked, ids, layers=[2], sweep=am.ablate_heads(hooked, ids, [(0, 1)]))
    with pytest.raises(InputError, match=r"means for layers \[1\], but not for layer 0"):
        am.head_importance(hooked, ids, method="mean", reference=am.mean_z(hooked, ids, layers=[1]))
