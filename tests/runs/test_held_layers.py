"""Layers that are added one by one, some together or all at once give the same sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hooked, inputs_of

import attnmech as am
from attnmech.runs import reducer
from attnmech.runs.reducer import HeldLayers


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gemma2"])
@pytest.mark.parametrize("call", [am.attention_focus, am.residual_updates])
def test_sums_do_not_depend_on_how_many_layers_are_added_together(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], name: str
) -> None:
    together = call(hooked(name), inputs_of(name))
    monkeypatch.setattr(reducer, "block_bytes", lambda device: 1)
    apart = call(hooked(name), inputs_of(name))
    assert together.state.keys() == apart.state.keys()
    for entry, value in together.state.items():
        assert torch.equal(value, apart.state[entry]), entry


def test_layers_are_held_until_the_next_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "block_bytes", lambda device: 100)
    held: HeldLayers[str, str] = HeldLayers()
    device = torch.device("cpu")
    added = [held.add("window" if layer % 2 else "whole", layer, f"of {layer}", 40, device) for layer in range(6)]
    assert added == [{}, {}, {0: "of 0", 2: "of 2"}, {1: "of 1", 3: "of 3"}, {}, {}]
    assert dict(held.rest()) == {"whole": {4: "of 4"}, "window": {5: "of 5"}}
    assert list(held.rest()) == []
