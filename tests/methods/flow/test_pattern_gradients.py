"""Gradient-weighted attention against autograd on plain transformers, first-order scores and finite differences."""

from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am


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
    metric = some_logit(ran.logits, None).sum()
    gradients = torch.autograd.grad(metric, ran.attentions)
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
    view = flow.show(view="sentence", layer=1, head=2)
    assert view.data["words"]["whole"] == "gradient-weighted attention"
    rows = flow.shares.sum(dim=-1)
    assert bool(((rows - 1).abs().lt(1e-5) | (rows == 0)).all())
    assert not bool(flow.maps[:, -1].any()) and set(flow.to_frame().query("token == token.max()").top) == {-1}
    largest = flow.head_maps.abs().max()
    assert f"{float(largest):.3g}" in flow.lead and "Gradient-weighted attention for loss: largest in L" in flow.lead
    assert "<b>" not in flow.to_html()
    figure = flow.plot(layer=1, head=2)
    assert torch.equal(torch.tensor(figure.data[0].z), flow.head_maps[1, 2]) and figure.data[0].zmin < 0
