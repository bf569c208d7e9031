"""Unreferenced models are freed at once, without waiting for Python to collect reference cycles."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch import nn

import attnmech as am
from attnmech.errors import WeightsError

NAMES = [
    "gpt2", "bloom", "llama", "bert", "falcon_multi_query", "deberta", "t5", "vit", "jamba", "longformer", "led",
    "xlnet",
]  # fmt: skip


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


def references_to(hooked: am.HookedModel, model: nn.Module) -> dict[str, weakref.ref[Any]]:
    weights = {name: weakref.ref(value) for name, value in model.named_parameters()}
    return {"hooked": weakref.ref(hooked), "stack": weakref.ref(next(iter(hooked.stacks.values()))), **weights}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_has_run_is_freed(name: str) -> None:
    model = models.fresh(name)
    hooked = am.load(model)
    hooked.run(models.inputs_of(name))
    references = references_to(hooked, model)
    del hooked, model
    assert alive(references) == []


def test_a_model_is_freed_after_methods_hooks_and_interventions() -> None:
    model, ids = models.fresh("gpt2"), models.token_ids("gpt2")
    hooked = am.load(model)
    focus = am.attention_focus(hooked, ids)
    am.decompose_scores(hooked, ids)
    am.ablate_heads(hooked, ids, [(0, 1)])
    am.head_importance(hooked, ids)
    with hooked.hooks({("pattern", 1): lambda pattern: pattern * 0.5}):
        hooked.run(ids, points=["z"])
    with hooked.intervene(am.Intervention.zero([(1, 2)])):
        hooked.loss(ids)
    am.certify(hooked)
    references = references_to(hooked, model)
    del hooked, model
    assert alive(references) == []
    assert focus.n_layers == 3


def test_what_a_run_returned_outlives_its_model() -> None:
    hooked, ids = am.load(models.fresh("bloom")), models.token_ids("bloom")
    acts = hooked.run(ids, points=["pattern"])
    values, weights = acts["pattern", 1].clone(), hooked.weights(1)
    W_Q = weights.W_Q.clone()
    del hooked
    assert torch.equal(acts["pattern", 1], values) and torch.equal(weights.W_Q, W_Q)


def test_the_users_bridge_outlives_the_certificate() -> None:
    hooked, ids = am.load(models.fresh("gpt2")), models.token_ids("gpt2")
    bridge = hooked.bridge
    am.certify(hooked)
    assert hooked.bridge is bridge
    torch.testing.assert_close(bridge(ids), hooked.run(ids).logits, atol=1e-5, rtol=1e-5)


def test_failing_models_are_freed() -> None:
    model = models.fresh("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    weight = weakref.ref(model.transformer.h[1].mlp.c_fc.weight)
    with contextlib.suppress(WeightsError):
        am.load(model)
    del model
    assert weight() is None
