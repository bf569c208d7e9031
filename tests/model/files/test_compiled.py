"""Compiled models, and models under `torch.inference_mode`, give what plain ones give."""

import shutil
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch

import attnmech as am

IDS = torch.arange(3, 14)[None]
BACKEND = "inductor" if shutil.which("g++") else "eager"


def whole(raw: Any) -> Any:
    return torch.compile(raw, backend=BACKEND)


def in_place(raw: Any) -> Any:
    raw.compile(backend=BACKEND)
    return raw


def block_by_block(raw: Any) -> Any:
    layers = raw.model.layers
    for number, block in enumerate(layers):
        layers[number] = torch.compile(block, backend=BACKEND)
    return raw


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(whole, marks=pytest.mark.slow, id="whole"),
        pytest.param(in_place, id="in_place"),
        pytest.param(block_by_block, id="block_by_block"),
    ],
)
def test_a_compiled_model_is_read_as_the_one_that_it_wraps(compiled: Callable[[Any], Any]) -> None:
    source, plain = compiled(models.fresh("llama")), models.hooked("llama")
    with torch.no_grad():
        before = source(IDS).logits
    model = am.load(source)
    assert model.certificate.ok and model.weights_hash == plain.weights_hash
    points = ["pattern", "z", "resid_post"]
    ours, theirs = (each.run(IDS, points=[*points, "logits"]) for each in (model, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in points)
    assert torch.allclose(ours.logits, before, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(source(IDS).logits, before)


def test_loading_and_calls_in_inference_mode() -> None:
    plain = models.hooked("llama")
    with torch.inference_mode():
        model = am.load(models.fresh("llama"))
        assert model.certificate.ok
        focus, run = am.attention_focus(model, IDS), model.run(IDS, points=["pattern"])
        effects = am.ablate_heads(model, [IDS, IDS + 1], metric="loss").effect
    assert torch.equal(run["pattern"], plain.run(IDS, points=["pattern"])["pattern"])
    assert torch.equal(focus["entropy"].mean, am.attention_focus(plain, IDS)["entropy"].mean)
    assert torch.allclose(effects, am.ablate_heads(plain, [IDS, IDS + 1], metric="loss").effect)
    # torch does not count changes of weights that were made in inference mode.
    assert torch.equal(model.run(IDS, points=["z"])["z"], plain.run(IDS, points=["z"])["z"])
