"""What is streamed is the same with compiled rows and without, on every family."""

import models
import pytest
import torch

import attnmech as am
from attnmech.maths import compiled

EVERY = [*models.MAKERS, *models.NEW, *models.OTHERS]


def streamed(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    model = models.hooked(name, dtype)
    inputs, found = models.inputs_of(name), []
    for stack in model.stacks:
        reducers: list[am.Reducer] = [am.AttentionFocus.reducer()]
        if model.points[f"{stack}.resid_pre" if stack else "resid_pre"].absent is None:
            reducers.append(am.ResidualUpdates.reducer())
        found += [dict(each.state) for each in am.stream(model, inputs, reducers, stack=stack or None)]
    return found


@pytest.mark.parametrize("name", EVERY)
def test_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_loops = streamed(name, torch.float32)
    monkeypatch.setattr(compiled, "AVAILABLE", False)
    without = streamed(name, torch.float32)
    for one, other in zip(with_loops, without, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            close = torch.isclose(value, other[key], rtol=1e-5, atol=1e-5, equal_nan=True)
            assert bool(close.all()), (key, (value - other[key]).abs().max())
