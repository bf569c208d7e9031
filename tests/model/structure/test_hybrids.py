"""Hybrids of attention and other layers: layers with attention keep the model's own numbers."""

import models
import pytest
import torch

from attnmech.errors import InputError

NAMES = ("jamba", "bamba", "lfm2")


IDS = torch.tensor([[5, 9, 3, 30, 7, 7, 12, 40]])


@pytest.mark.parametrize("name", NAMES)
def test_layers_keep_the_numbers_of_the_model(name: str) -> None:
    acts = models.hooked(name).run(IDS, points=["pattern", "resid_pre"])
    assert sorted(layer for point, layer in acts.values if point == "pattern") == [1, 3]
    with torch.no_grad():
        states = models.plain(name)(IDS, output_hidden_states=True, use_cache=False).hidden_states
    for layer in (1, 3):
        torch.testing.assert_close(acts["resid_pre", layer], states[layer], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"one of 1, 3 \(the layers of this model with attention\); got 0"):
        models.hooked(name).run(IDS, points=[("pattern", 0)])


def test_lfm2s_scores_from_the_raw_weights() -> None:
    model, layer = models.plain("lfm2"), 3
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
    found = models.hooked("lfm2").run(IDS, points=[("scores", layer)])["scores", layer]
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
