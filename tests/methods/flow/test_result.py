"""Flow against naive loops over patterns, values and weights, vector by vector."""

from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError, MissingPointError

FAMILIES = ("bloom", "gpt2", "bert", "mistral", "gpt_oss", "qwen3_bias", "falcon_new")


def loaded(name: str) -> tuple[am.HookedModel, Tensor]:
    dtype = torch.float32 if name in models.SINGLE_ONLY else torch.float64
    return models.hooked(name, dtype), models.token_ids(name, 1)


@pytest.mark.core
@pytest.mark.parametrize("name", FAMILIES)
def test_rollout_is_that_of_a_loop(name: str) -> None:
    model, ids = loaded(name)
    flow = am.attention_flow(model, ids)
    acts = model.run(ids, points=["pattern"])
    rolled = torch.eye(7, dtype=flow.maps.dtype)
    for layer in range(model.n_layers):
        mean = sum(acts["pattern", layer][0, head] for head in range(model.n_heads)) / model.n_heads
        mixed = (mean + torch.eye(7)) / 2
        rolled = (mixed / mixed.sum(-1, keepdim=True)) @ rolled
        torch.testing.assert_close(flow.maps[layer], rolled, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(flow.maps.sum(-1), torch.ones_like(flow.maps[..., 0]), atol=1e-6, rtol=0)
    if model.causal:
        assert not bool(flow.maps.triu(1).any())


def carried(model: am.HookedModel, ids: Tensor, layer: int) -> Tensor:
    """p_ij f(x_j) of each head, [head query key d_model]."""
    acts = model.run(ids, points=["pattern", "v"])
    W_O, pattern, v = model.weights(layer).W_O.detach(), acts["pattern", layer][0], acts["v", layer][0]
    found = torch.zeros(*pattern.shape, model.d_model, dtype=pattern.dtype)
    for head in range(model.n_heads):
        for key in range(len(v)):
            f = v[key, head // (model.n_heads // v.shape[1])] @ W_O[head]
            found[head, :, key] = pattern[head, :, key, None] * f
    return found


@pytest.mark.core
@pytest.mark.parametrize("name", FAMILIES)
def test_norms_are_those_of_a_loop_and_sum_to_attn_raw(name: str) -> None:
    model, ids = loaded(name)
    flow = am.attention_flow(model, ids, "norm")
    acts = model.run(ids, points=["attn_raw"])
    assert flow.head_maps is not None
    error = 2e-5 if name in models.SINGLE_ONLY else 1e-7
    for layer in range(model.n_layers):
        parts = carried(model, ids, layer)
        b_O = model.weights(layer).b_O
        whole = parts.sum(dim=(0, 2)) + (0 if b_O is None else b_O.detach())
        torch.testing.assert_close(whole, acts["attn_raw", layer][0], atol=error, rtol=error)
        torch.testing.assert_close(flow.head_maps[layer], parts.norm(dim=-1), atol=error, rtol=error)
        torch.testing.assert_close(flow.maps[layer], parts.sum(dim=0).norm(dim=-1), atol=error, rtol=error)


@pytest.mark.parametrize("name", ["bloom", "llama", "bert", "roberta", "opt_post"])
def test_with_residual_and_norm(name: str) -> None:
    model, ids = loaded(name)
    flow = am.attention_flow(model, ids, "norm_residual")
    points = ["resid_pre", "resid_mid"] if model.architecture.norm == "post" else ["resid_pre"]
    acts = model.run(ids, points=points)
    for layer in range(model.n_layers):
        parts = carried(model, ids, layer).sum(dim=0)
        x = acts["resid_pre", layer][0]
        for row in range(len(x)):
            parts[row, row] += x[row]
        if model.architecture.norm == "post":
            norm = model.stack().module(layer, model.architecture.mid_norm)
            spread = (acts["resid_mid", layer][0].var(dim=-1, unbiased=False) + norm.eps).sqrt()
            parts = (parts - parts.mean(-1, keepdim=True)) / spread[:, None, None] * norm.weight.detach()
        torch.testing.assert_close(flow.maps[layer], parts.norm(dim=-1), atol=1e-7, rtol=1e-6)


def test_a_norm_between_attention_and_stream_is_part_of_f() -> None:
    model, ids = loaded("gemma2")
    flow = am.attention_flow(model, ids, "norm")
    acts = model.run(ids, points=["attn_raw", "attn_out"])
    for layer in range(model.n_layers):
        scale = acts["attn_out", layer][0] / acts["attn_raw", layer][0]
        parts = carried(model, ids, layer) * scale[:, None]
        torch.testing.assert_close(flow.maps[layer], parts.sum(dim=0).norm(dim=-1), atol=1e-6, rtol=1e-5)


def after_padding(ids: Tensor) -> dict[str, Tensor]:
    mask = torch.tensor([[0, 0, *[1] * ids.shape[1]]])
    return {"input_ids": torch.cat((torch.zeros(1, 2, dtype=torch.long), ids), 1), "attention_mask": mask}


@pytest.mark.parametrize("kind", ["rollout", "norm", "norm_residual", "gradient"])
def test_padding_changes_nothing(kind: str) -> None:
    model, ids = loaded("llama")
    one, other = am.attention_flow(model, ids, kind), am.attention_flow(model, after_padding(ids), kind)
    torch.testing.assert_close(other.maps, one.maps, atol=1e-6, rtol=1e-5)  # rotary tables are float32
    assert len(other.tokens) == ids.shape[1]


def test_shown_and_drawn() -> None:
    for kind in ("rollout", "norm", "norm_residual"):
        flow = am.attention_flow(models.demo(), "Anna sang of <b>shells</b>.", kind)
        torch.testing.assert_close(flow.shares.sum(-1), torch.ones_like(flow.shares[..., 0]))
        assert flow.show("sentence", layer=1).data["heads"] == flow.shares.shape[1]
        assert "<b>" not in flow.to_html()


PAIR = torch.tensor([[5, 7]])
BAD: list[tuple[Callable[[am.HookedModel], Any], str]] = [
    *((lambda m, kind=kind: am.attention_flow(m, PAIR.T, kind), "one text at a time; got 2")
      for kind in ("rollout", "gradient")),
    (lambda m: am.attention_flow(m, PAIR, "values"), "must be one of rollout, norm"),
    (lambda m: am.attention_flow(m, PAIR, layers=[0]), "leave out `layers`"),
    (lambda m: am.attention_flow(m, PAIR).plot(head=0), 'only method="norm" and method="gradient" have maps by head'),
    (lambda m: am.attention_flow(m, PAIR, "norm", metric="loss"), 'are for method="gradient"'),
    (lambda m: am.attention_flow(m, PAIR, "gradient", metric="accuracy", answers=[3]), "has no gradient"),
    (lambda m: am.attention_flow(m, PAIR, "gradient", metric="kl"), "its gradient there is 0"),
    (lambda m: am.attention_flow(m, PAIR, "gradient", metric="logit_difference"), "needs `answers`"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input(call: Callable[[am.HookedModel], Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call(models.hooked("llama"))
    assert words in str(caught.value)


def test_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.methods.flow import result as module

    monkeypatch.setattr(module, "MOST_BYTES", 100)
    refuses("Give a text of up to", am.attention_flow, models.hooked("llama"), models.token_ids("llama", 1))


@pytest.mark.parametrize("name", ["bloom", "llama", "bert", "gpt_oss", "falcon_new", "gemma2"])
def test_views_weighted_by_value_are_norms_as_shares(name: str) -> None:
    model, ids = loaded(name)
    acts = model.run(ids, points=["pattern", "v"])
    assert not any(norms.requires_grad for norms in acts.value_norms.values())
    for layer in range(model.n_layers):
        parts = carried(model, ids, layer)
        if name == "gemma2":
            parts = parts * (1 + model.stack().module(layer, "post_attention_layernorm").weight.detach())
        norms = parts.norm(dim=-1)
        for head in (0, model.n_heads - 1):
            view = acts.show("pattern", layer=layer, head=head, weighted="value")
            shares = (norms[head] / norms[head].sum(dim=-1, keepdim=True)).double()
            torch.testing.assert_close(_cells(view), shares, atol=1e-3, rtol=1e-3)
            assert "‖p f(x)‖" in view.reading
    lines = acts.show("pattern", view="sentence", weighted="value")
    assert lines.data["words"]["whole"] == "value-weighted attention"


def test_weighted_views_say_what_they_need() -> None:
    model, ids = loaded("llama")
    acts = model.run(ids, points=["pattern", "scores"])
    with pytest.raises(MissingPointError, match=r"capture both with model.run\(..., points=\['pattern', 'v'\]\)"):
        acts.show("pattern", layer=0, weighted="value")
    refuses("must be one of value", acts.show, "pattern", layer=0, weighted="norm")
    refuses("for the point \"pattern\"; got 'scores'", acts.show, "scores", layer=0, weighted="value")
    whole, padded = (model.run(each, points=["pattern", "v"]) for each in (ids, after_padding(ids)))
    cells = [_cells(each.show("pattern", layer=1, head=2, weighted="value")) for each in (whole, padded)]
    torch.testing.assert_close(cells[0], cells[1], atol=1e-3, rtol=1e-3)


def _cells(view: Any) -> Tensor:
    return torch.tensor(np.array(view.data["props"]["attention"], dtype=np.float64)).nan_to_num()


def some_logit(logits: Tensor, batch: Any) -> Tensor:
    """A metric of every model: a logit of the last token, and half another of the first."""
    found: Tensor = logits[:, -1, 3] - 0.5 * logits[:, 0, 5] ** 2
    return found


@pytest.mark.core
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bloom"])
def test_maps_are_those_of_autograd_on_plain_transformers(name: str) -> None:
    plain, ids = models.fresh(name, torch.float64), models.token_ids(name, 1)
    plain.set_attn_implementation("eager")
    ran = plain(ids, output_attentions=True)
    gradients = torch.autograd.grad(some_logit(ran.logits, None).sum(), ran.attentions)
    flow = am.attention_flow(models.hooked(name, torch.float64), ids, "gradient", metric=some_logit)
    assert flow.head_maps is not None and flow.metric == "some_logit"
    for layer, (pattern, gradient) in enumerate(zip(ran.attentions, gradients, strict=True)):
        product = (pattern * gradient)[0].detach()
        assert float(product.abs().max()) > 1e-3 and float(product.min()) < 0
        torch.testing.assert_close(flow.head_maps[layer], product, atol=1e-6, rtol=1e-5)  # rotary tables are float32
        whole = sum(each.clamp_min(0) for each in product) / len(product)
        torch.testing.assert_close(flow.maps[layer], whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gpt_oss", "falcon_new"])
def test_a_heads_sum_is_its_first_order_score_and_a_finite_difference(name: str) -> None:
    dtype = torch.float32 if name in models.SINGLE_ONLY else torch.float64
    model, ids = models.hooked(name, dtype), models.token_ids(name, 1)
    flow = am.attention_flow(model, ids, "gradient")
    assert flow.head_maps is not None and flow.metric == "loss"
    sums = flow.head_maps.double().sum(dim=(-2, -1))
    score = am.head_importance(model, ids, method="zero").score
    tolerance = 2e-5 if name in models.SINGLE_ONLY else 1e-6
    torch.testing.assert_close(-sums, score.double(), atol=tolerance, rtol=1e-4)
    layer, head, step = 1, model.n_heads - 1, 1e-2 if dtype == torch.float32 else 1e-4

    def loss(factor: float) -> float:
        def scaled(pattern: Tensor) -> Tensor:
            changed = pattern.clone()
            changed[:, head] *= factor
            return changed

        with model.hooks({("pattern", layer): scaled}):
            logits = model.run(ids).logits.double()
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    difference = (loss(1 + step) - loss(1 - step)) / (2 * step)
    assert float(sums[layer, head]) == pytest.approx(difference, rel=2e-2 if dtype == torch.float32 else 1e-4, abs=2e-5)


def test_layers_and_answers() -> None:
    model, ids = models.hooked("gpt2", torch.float64), models.token_ids("gpt2", 1)
    given: dict[str, Any] = {"metric": "logit_difference", "answers": [4], "against": [9]}
    whole = am.attention_flow(model, ids, "gradient", **given)
    some = am.attention_flow(model, ids, "gradient", layers=[2, 0], **given)
    assert some.layers == (2, 0) and whole.head_maps is not None and some.head_maps is not None
    torch.testing.assert_close(some.head_maps, whole.head_maps[[2, 0]])


def test_shown_and_said() -> None:
    flow = am.attention_flow(models.demo(), "Anna sang of <b>shells</b>.", "gradient")
    assert flow.head_maps is not None
    assert flow.show("sentence", layer=1, head=2).data["words"]["whole"] == "gradient-weighted attention"
    rows = flow.shares.sum(dim=-1)
    assert bool(((rows - 1).abs().lt(1e-5) | (rows == 0)).all())
    assert not bool(flow.maps[:, -1].any()) and set(flow.to_frame().query("token == token.max()").top) == {-1}
    largest = flow.head_maps.abs().max()
    assert f"{float(largest):.3g}" in flow.lead and "Gradient-weighted attention for loss: largest in L" in flow.lead
    assert "<b>" not in flow.to_html()
    figure = flow.plot(layer=1, head=2)
    assert torch.equal(torch.tensor(figure.data[0].z), flow.head_maps[1, 2]) and figure.data[0].zmin < 0
