"""A model that is sent to another process computes the same there; a model that cannot be sent is refused."""

from pathlib import Path

import models
import pytest
import torch
from torch import nn

import attnmech as am
from attnmech.errors import UnsupportedModelError
from attnmech.model.files import travelling
from attnmech.model.files.travelling import Blueprint, weights_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "bert", "t5", "gpt_neox"])
def test_weights_that_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travelling, "PART_BYTES", 2000)
    model = am.load(models.plain(name))
    parts = list(weights_of(model))
    built = Blueprint.of(model).with_weights(parts, CPU)
    assert len(parts) > 2
    assert built.certificate == model.certificate and built.weights_hash == model.weights_hash
    ids = torch.tensor([[3, 7, 5, 11, 4]])
    label = model.output_stack.point("pattern")
    one, other = (each.run(ids, points=[label])[label, 1] for each in (model, built))
    assert torch.equal(one, other)


def test_weights_from_disk(tmp_path: Path) -> None:
    models.plain("gpt2").save_pretrained(tmp_path)
    model = am.load(tmp_path)
    plan = Blueprint.of(model)
    built = plan.from_disk(CPU)
    assert built is not None and built.weights_hash == model.weights_hash and built.certificate == model.certificate
    with torch.no_grad():
        next(parameter for _, parameter in model.named_parameters()).add_(0.5)
    assert Blueprint.of(model).from_disk(CPU) is None  # the weights on disk differ now
    changed = Blueprint.of(model).with_weights(weights_of(model), CPU)
    assert changed.weights_hash == model.weights_hash != plan.weights
    (tmp_path / "model.safetensors").unlink()
    assert plan.from_disk(CPU) is None


def test_what_cannot_be_sent() -> None:
    plan, other = (am.load(models.plain(name)) for name in ("gpt2", "bloom"))
    with pytest.raises(UnsupportedModelError, match=r"cannot build GPT2LMHeadModel \(it holds .* Save it to a folder"):
        Blueprint.of(plan).with_weights(weights_of(other), CPU)
    with pytest.raises(UnsupportedModelError, match=r"its config implies 'transformer\.wte\.weight', which it lacks"):
        Blueprint.of(plan).with_weights([], CPU)
    own = am.load(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), example=torch.randn(2, 5, 12))
    with pytest.raises(UnsupportedModelError, match="is a module of your own, which worker processes cannot build"):
        Blueprint.of(own)
    hooked = models.plain("gpt2")
    handle = hooked.transformer.register_forward_hook(lambda *_: None)
    try:
        model = am.load(hooked)
    finally:
        handle.remove()
    hooked.transformer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="has forward hooks, which are not sent to worker processes"):
        Blueprint.of(model)
    hooked.transformer._forward_hooks.clear()
