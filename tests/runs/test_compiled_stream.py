"""What is streamed is the same with compiled rows and without, on every family."""

import models
import pytest
import torch

import attnmech as am
from attnmech.maths import compiled

EVERY = [*models.MAKERS, *models.NEW, *models.OTHERS]


def streamed(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    model = models.hooked(name, dtype)
    reducers = [am.AttentionFocus.reducer(), am.ResidualUpdates.reducer()]
    stacks = list(model.stacks)
    inputs = models.inputs_of(name)
    return [dict(each.state) for stack in stacks for each in am.stream(model, inputs, reducers, stack=stack or None)]


@pytest.mark.parametrize("name", EVERY)
def test_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_loops = streamed(name, torch.float32)
    monkeypatch.setattr(compiled, "AVAILABLE", False)
    without = streamed(name, torch.float32)
    for one, other in zip(with_loops, without, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            close = torch.isclose(value, other[key], rtol=2e-6, atol=2e-6, equal_nan=True)
            assert bool(close.all()), (key, (value - other[key]).abs().max())
