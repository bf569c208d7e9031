"""Hybrids of attention and other layers: layers with attention keep the model's own numbers."""

from functools import cache
from typing import Any

import models
import pytest
import torch

import attnmech as am
from attnmech.errors import InputError

NAMES = ("jamba", "bamba", "lfm2")


@cache
def original(name: str) -> Any:
    return models.fresh(name)


@cache
def hooked(name: str) -> am.HookedModel:
    return am.load(original(name))


IDS = torch.tensor([[5, 9, 3, 30, 7, 7, 12, 40]])


@pytest.mark.parametrize("name", NAMES)
def test_every_check_holds_and_logits_are_those_of_transformers(name: str) -> None:
    assert hooked(name).certificate.ok, repr(hooked(name).certificate)
    with torch.no_grad():
        expected = original(name)(IDS, use_cache=False).logits
    torch.testing.assert_close(hooked(name).run(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_layers_keep_the_numbers_of_the_model(name: str) -> None:
    acts = hooked(name).run(IDS, points=["pattern", "resid_pre"])
    assert sorted(layer for point, layer in acts.values if point == "pattern") == [1, 3]
    with torch.no_grad():
        states = original(name)(IDS, output_hidden_states=True, use_cache=False).hidden_states
    for layer in (1, 3):
        torch.testing.assert_close(acts["resid_pre", layer], states[layer], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"one of 1, 3 \(the layers of this model with attention\); got 0"):
        hooked(name).run(IDS, points=[("pattern", 0)])


@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_adds_up(name: str) -> None:
    split = am.decompose_scores(hooked(name), IDS)
    assert split.layers == (1, 3)
    scores = hooked(name).run(IDS, points=["scores"])
    for index, layer in enumerate(split.layers):
        total = sum(term[:, index] for term in split.terms.values())
        seen = split.visible[:, index].expand_as(total)
        torch.testing.assert_close(total[seen], scores["scores", layer][seen], rtol=1e-5, atol=1e-5)


def test_lfm2s_scores_from_the_raw_weights() -> None:
    model, layer = original("lfm2"), 3
    with torch.no_grad():
        stream = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[layer]
        block = model.model.layers[layer]
        part, x = block.self_attn, block.operator_norm(stream)
        q = part.q_layernorm(part.q_proj(x).unflatten(-1, (6, 4))).transpose(1, 2)
        k = part.k_layernorm(part.k_proj(x).unflatten(-1, (2, 4))).transpose(1, 2).repeat_interleave(3, dim=1)
        theta = torch.arange(0, 4, 2) / 4
        angle = torch.arange(8)[:, None] * model.config.rope_parameters["rope_theta"] ** -theta
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.view_as_real(torch.complex(y[..., :2], y[..., 2:]) * turn).flatten(-2) for y in (q, k))
        expected = q @ k.transpose(-1, -2) / 2
    seen = torch.ones(8, 8).tril().bool().expand_as(expected)
    found = hooked("lfm2").run(IDS, points=[("scores", layer)])["scores", layer]
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
