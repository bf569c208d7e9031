"""Attribution equals the formula on the raw model's gradients; it is exact where the metric is linear."""

import math
from functools import partial
from typing import Any

import models
import own
import planted
import pytest
import torch
from by_hand import JUDGED, logit_differences, pair, plan_of, point_changed, seen, values_and_gradients
from comparing import refuses
from einops import rearrange
from scipy.stats import spearmanr
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.attribution.formulas import count_interval
from attnmech.methods.attribution.relevance import relevance_rules

BOTH: dict[str, Any] = {"nodes": "heads+mlps", **JUDGED}


def by_autograd(plain: Any, ids: Tensor, start: Tensor | None = None, share: float = 0.0) -> dict[str, list[Any]]:
    """Values and gradients with the first stream moved towards `start`."""
    with point_changed(plain, "resid_pre", 0, lambda x: x if start is None else x + share * (start - x)):
        return values_and_gradients(plain, ids, partial(logit_differences, **JUDGED))


def expected(plain: Any, clean: Tensor, corrupted: Tensor, steps: int) -> Tensor:
    """Σ (clean − corrupted) · mean gradient, node by node: `[layer node pair]`; 0 steps is the corrupted run."""
    of_clean, of_corrupted = by_autograd(plain, clean), by_autograd(plain, corrupted)
    runs = [of_corrupted]
    if steps:
        start = seen(plain, clean, "resid_pre", 0)
        runs = [by_autograd(plain, corrupted, start, (2 * step + 1) / (2 * steps)) for step in range(steps)]
    heads, layers = plan_of(plain).n_heads, []
    for layer in range(len(of_clean["z"])):
        nodes: list[Tensor] = []
        for point, split in (("z", heads), ("mlp", 1)):
            change = of_clean[point][layer] - of_corrupted[point][layer]
            gradient = torch.stack([run[f"{point} gradient"][layer] for run in runs]).mean(dim=0)
            by_node = rearrange(change * gradient, "pair position (node d) -> node pair position d", node=split)
            nodes += by_node.sum(dim=(-1, -2))
        layers.append(torch.stack(nodes))
    return torch.stack(layers)


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox", "bloom"])
@pytest.mark.parametrize("steps", [0, 3])
def test_estimates_equal_the_formula_on_the_raw_model(family: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, plain = models.hooked(family, torch.float64), models.fresh(family, torch.float64)
    models.in_attention(plain, "eager")
    clean, corrupted = pair(family)
    method = {"method": "integrated", "steps": steps} if steps else {}
    attribution = am.attribute(hooked, clean, corrupted, **method, **BOTH)
    # transformers' eager attention rounds its softmax to float32.
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, dtype=None: x.softmax(dim=dim))
    assert attribution.per_pair.dtype == torch.float64
    torch.testing.assert_close(attribution.per_pair, expected(plain, clean, corrupted, steps), rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        before = logit_differences(plain(corrupted).logits, **JUDGED)
    torch.testing.assert_close(attribution.before, before, rtol=1e-8, atol=1e-8)
    heads = am.attribute(hooked, clean, corrupted, layers=[1], **method, **JUDGED)
    torch.testing.assert_close(heads.per_pair[1], attribution.per_pair[1, :-1], rtol=1e-12, atol=1e-12)
    assert heads.per_pair[0].isnan().all() and heads._n_heads == attribution._n_heads == hooked.n_heads


def second_logits(logits: Tensor, batch: Any) -> Tensor:
    return logits[:, 1, 3].tanh() + logits[:, -1, 4]


@pytest.mark.parametrize(
    ("metric", "method"),
    [("logit_difference", "integrated"), ("loss", "gradient"), ("log_probability", "gradient"),
     (second_logits, "gradient")],
)  # fmt: skip
def test_estimates_are_exact_for_small_differences(method: str, metric: Any) -> None:
    """Two tokens have nearly the same embedding, so the runs that differ in them are nearly the same."""
    plain = models.fresh("gpt2", torch.float64)
    with torch.no_grad():
        embedding = plain.transformer.wte.weight
        embedding[21] = embedding[20] + 1e-5 * own.noise(embedding.shape[1]).double()
    clean, corrupted = (models.token_ids("gpt2") for _ in range(2))
    clean[:, 2], corrupted[:, 2] = 21, 20
    options = {"logit_difference": JUDGED, "log_probability": {"answers": corrupted[:, -1]}}.get(metric, {})
    attribution = am.attribute(
        am.load(plain), clean, corrupted, nodes="heads+mlps", metric=metric, method=method, confirm=18, **options
    )
    assert attribution.exact is not None and attribution.exact.abs().max() > 1e-7
    torch.testing.assert_close(attribution.per_pair, attribution.exact, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_relevance_patching_takes_the_gradients_of_its_rules(family: str) -> None:
    hooked, (clean, corrupted) = models.hooked(family, torch.float64), pair(family)

    def differences(logits: Tensor) -> Tensor:
        return logit_differences(logits, **JUDGED)

    with relevance_rules(hooked, hooked.encode(corrupted)):
        ran = hooked.run(corrupted, ["z", "mlp_out"], gradients_of=differences)
    one = hooked.run(clean, ["z", "mlp_out"])
    assert ran.gradients is not None
    attribution = am.attribute(hooked, clean, corrupted, method="relp", **BOTH)
    for layer in range(hooked.n_layers):
        z, mlp = ((one[at, layer] - ran[at, layer]) * ran.gradients[at, layer] for at in ("z", "mlp_out"))
        nodes = torch.cat([z.sum(dim=(1, 3)).T, mlp.sum(dim=(1, 2))[None]])
        torch.testing.assert_close(attribution.per_pair[layer], nodes, rtol=1e-9, atol=1e-9)
    by_gradient = am.attribute(hooked, clean, corrupted, **BOTH)
    assert (attribution.effect - by_gradient.effect).abs().max() > 1e-3
    assert hooked.edited == ()


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_exact_effects_are_those_of_patching(family: str) -> None:
    hooked, plain = models.hooked(family), models.plain(family)
    clean, corrupted = pair(family)
    heads, count = hooked.n_heads, hooked.n_layers * (hooked.n_heads + 1)
    attribution = am.attribute(hooked, clean, corrupted, confirm=2, controls=count, **BOTH)
    assert attribution.exact is not None and attribution.controls is not None
    assert int(attribution.controls.sum()) == count - 2
    patched = am.patch(hooked, clean, corrupted, **JUDGED)
    torch.testing.assert_close(attribution.exact[:, :heads], patched.per_text, rtol=1e-4, atol=1e-5)
    for layer in range(hooked.n_layers):
        written = seen(plain, clean, "mlp_out", layer)
        with torch.no_grad(), point_changed(plain, "mlp_out", layer, lambda x, written=written: written):
            after = logit_differences(plain(corrupted).logits, **JUDGED)
        torch.testing.assert_close(attribution.exact[layer, heads], after - attribution.before, rtol=1e-4, atol=1e-5)
    some = am.attribute(hooked, clean, corrupted, confirm=3, controls=2, seed=4, **BOTH)
    assert some.exact is not None and some.confirmation is not None
    measured = ~some.exact.isnan().any(dim=-1)
    assert int(measured.sum()) == 5
    torch.testing.assert_close(some.exact[measured], attribution.exact[measured], rtol=1e-4, atol=1e-5)
    size = some.effect.abs()
    order = [divmod(place, heads + 1) for place in size.flatten().argsort(descending=True).tolist()]
    strongest = {f"L{layer} MLP" if node == heads else f"L{layer}H{node}" for layer, node in order[:3]}
    pairs = zip(some.confirmation.names, some.confirmation.control.tolist(), strict=True)
    assert {name for name, control in pairs if not control} == strongest
    frame = some.strongest(3)
    torch.testing.assert_close(torch.tensor(frame["effect"]), torch.stack([some.effect[place] for place in order[:3]]))
    assert frame["head"].isna().tolist() == [node == heads for _, node in order[:3]]
    again = am.attribute(hooked, clean, corrupted, confirm=3, controls=2, seed=5, **BOTH)
    assert again.confirmation is not None and again.confirmation.names != some.confirmation.names


@pytest.mark.core
@pytest.mark.parametrize("method", ["gradient", "integrated"])
def test_the_heads_of_a_planted_circuit_come_first_and_are_confirmed(method: str) -> None:
    clean, corrupted, judged = planted.cued_pairs()
    attribution = am.attribute(
        planted.and_pair("gpt2"), clean, corrupted, method=method, confirm=2, controls=22, **judged
    )
    assert {(row.layer, row.head) for row in attribution.strongest(2).itertuples()} == {(0, 2), (2, 5)}
    confirmation = attribution.confirmation
    assert confirmation is not None
    assert confirmation.holds[~confirmation.control].all()
    assert confirmation.missed == (0.0, 0, 0)
    assert "2 of the 2 strongest hold; 0 of the 22 others are as strong (all measured)" in attribution.lead


def test_where_either_of_two_heads_suffices_the_estimate_misses_both_and_the_controls_say_so() -> None:
    clean, corrupted, judged = planted.cued_pairs()
    rows = [number for number, answer in enumerate(judged["answers"]) if answer == planted.ANSWERS[0]]
    clean, corrupted = [clean[row] for row in rows], [corrupted[row] for row in rows]
    judged = {name: [tokens[row] for row in rows] for name, tokens in judged.items()}
    model, heads = planted.either_suffices(), [(0, 2), (0, 5)]
    exact = am.patch(model, clean, corrupted, **judged).effect
    attribution = am.attribute(model, clean, corrupted, confirm=2, controls=22, **judged)
    for head in heads:
        assert abs(attribution.effect[head]) < 0.05 * abs(exact[head])
    assert {tuple(place) for place in (exact.abs() > 0.5 * exact.abs().max()).nonzero().tolist()} == set(heads)
    assert attribution.confirmation is not None and attribution.confirmation.missed[0] >= 2
    integrated = am.attribute(model, clean, corrupted, method="integrated", **judged).strongest(2)
    assert {(row.layer, row.head) for row in integrated.itertuples()} == set(heads)
    for seed in range(3):
        few = am.attribute(model, clean, corrupted, confirm=2, controls=6, seed=seed, **judged).confirmation
        assert few is not None and few.missed[1] <= attribution.confirmation.missed[0] <= few.missed[2]


@pytest.mark.parametrize(("marked", "drawn", "total"), [(0, 20, 250), (3, 20, 250), (5, 5, 12), (2, 10, 10), (0, 1, 1)])
def test_the_interval_of_missed_nodes_inverts_the_hypergeometric_tests(marked: int, drawn: int, total: int) -> None:
    inside = []
    for count in range(total + 1):
        chance = [
            math.comb(count, x) * math.comb(total - count, drawn - x) / math.comb(total, drawn)
            for x in range(drawn + 1)
        ]  # fmt: skip
        if sum(chance[marked:]) > 0.025 and sum(chance[: marked + 1]) > 0.025:
            inside.append(count)
    assert count_interval(marked, drawn, total) == (inside[0], inside[-1])
    assert inside == list(range(inside[0], inside[-1] + 1))


def test_numbers_of_a_confirmation() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    exact = torch.tensor([3.0, -2.0, 1.0, 2.5, 0.0, 0.0])[:, None] + noise
    estimate = torch.tensor([2.0, -1.5, -1.2, 0.3, 0.1, -0.2], dtype=torch.float64)
    control = torch.tensor([False, False, False, True, True, True])
    measured = am.results.Confirmation(("a", "b", "c", "d", "e", "f"), estimate, exact, control, 30)
    assert measured.holds[:4].tolist() == [True, True, False, True]  # the third has the other sign
    assert measured._threshold == pytest.approx(float(exact[1].mean().abs()))
    assert measured.missed == (10.0, *count_interval(1, 3, 30))
    ranks = spearmanr(estimate, exact.mean(dim=1)).statistic
    assert measured.rank_correlation == pytest.approx(ranks)
    assert measured._slope == pytest.approx(float((estimate * exact.mean(dim=1)).sum() / (estimate**2).sum()))
    low, high = count_interval(1, 3, 30)
    assert measured.lead == (
        f"2 of the 3 strongest hold; about 10 of 30 others are as strong (95 %: {low} to {high}); rank correlation "
        f"{ranks:.2f} and slope {measured._slope:.2f} with exact patching."
    )
    assert repr(measured) == f"Confirmation({measured.lead})"
    frame = measured.to_frame()
    _, strongest, controls = measured.plot().data
    assert list(strongest.text) == ["a", "b", "c"] and list(controls.x) == estimate[3:].tolist()
    assert list(strongest.y) == exact[:3].mean(dim=1).tolist()
    low = measured.to_frame()["exact_low"][3:]
    torch.testing.assert_close(torch.tensor(controls.y - controls.error_y.arrayminus), torch.tensor(low.to_numpy()))
    assert list(frame) == ["node", "control", "estimate", "exact", "exact_low", "exact_high", "holds"]
    none = am.results.Confirmation(measured.names, estimate, noise, control, 30)
    assert "0 of the 3 strongest hold; about 0 of 30 others have a clear effect (95 %: 0 to" in none.lead
    few = am.results.Confirmation(measured.names, estimate, exact[:, :3], control, 30)
    assert few.lead.startswith("whether the 3 strongest hold is unknown; 3 pairs are too few for an interval")
    first = slice(1)
    single = am.results.Confirmation(measured.names[first], estimate[first], exact[first], control[first], 30)
    slope = float(exact[0].mean() / estimate[0])
    assert single.lead == f"the strongest holds; slope {slope:.2f} with exact patching."
    zero = am.results.Confirmation(measured.names[first], estimate[first] * 0, exact[first], control[first], 30)
    assert zero.lead == "the strongest does not hold; all estimates are 0."


def test_what_a_result_says_draws_and_subtracts() -> None:
    hooked, (clean, corrupted) = models.hooked("gpt2"), pair("gpt2")
    attribution = am.attribute(hooked, clean, corrupted, confirm=2, controls=3, **BOTH)
    assert repr(attribution).startswith(
        "Attribution(First-order estimate of patching each of 18 nodes on 3 pairs: whether the 2 strongest"
    )
    frame = attribution.to_frame()
    assert len(frame) == 18 and frame["head"].isna().sum() == 3 and frame["exact"].notna().sum() == 5
    assert list(attribution.by_head()["head"]) == list(range(5)) * 3
    assert attribution.plot().data[0].z.shape == (3, 5) and attribution.plot("mlps").data[0].z.shape == (3, 1)
    assert "Exact effects" in attribution.to_html()
    alone = am.attribute(hooked, clean, corrupted, **BOTH)
    assert alone.lead.endswith("; not compared with exact patching.") and alone.confirmation is None
    assert (attribution - alone).confirmation is None
    refuses(r"`figure` must be .*heads.*; got 'mlps'", am.attribute(hooked, clean, corrupted, **JUDGED).plot, "mlps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "accuracy"}, 'metric="accuracy" is a step function and has no gradient'),
        ({"metric": "kl"}, "its gradient there is 0"),
        ({"metric": lambda logits, batch: logits[:, -1].argmax(dim=-1).float()}, "the metric has no gradient"),
        ({"method": "relevance"}, "`method` must be one of gradient, integrated, relp"),
        ({"nodes": "mlps"}, "`nodes` must be one of heads, heads"),
        ({"steps": 0}, "`steps` must be a whole number, 1 or more"),
        ({"confirm": 16}, r"`confirm` must be a whole number, 0 to 15 \(the number of nodes\)"),
        ({"controls": -1}, "`controls` must be a whole number"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    refuses(message, am.attribute, models.hooked("gpt2"), *pair("gpt2"), **{**JUDGED, **options})


def test_losses_and_lines_that_models_do_not_have() -> None:
    plain = models.fresh("bert")
    plain.config.mask_token_id = 4
    refuses("the clean run sees the masked tokens; use", am.attribute, am.load(plain), *pair("bert"), metric="loss")
    with pytest.raises(InputError, match='this model has several; use method="gradient"'):
        am.attribute(models.hooked("t5"), ["a"], ["b"], method="integrated", answers=[1], against=[2])
