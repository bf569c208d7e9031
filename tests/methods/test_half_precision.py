"""Statistics of 16-bit models: everything after q and k is in float32, even if streams and scores reach the
type's limits."""

import itertools
from typing import Any

import models
import numpy as np
import pytest
import torch

import attnmech as am
from attnmech.errors import CertificateError
from attnmech.model.files.load import UnprovenWarning

HALF = (torch.float16, torch.bfloat16)
NAMES = ("gpt2", "qwen3", "bert")
"""transformers' own passes of the others overflow float16 on such streams."""


def stressed(name: str, dtype: torch.dtype) -> am.HookedModel:
    """A model with streams of ±30,000 in one dimension and in whole tokens."""
    model = models.fresh(name)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[5] *= 300.0
        embedding[:, 3] = 30_000.0 * torch.where(torch.arange(len(embedding)) % 2 == 0, 1.0, -1.0)
    return am.load(model, dtype=dtype)


def farther(hooked: am.HookedModel, ids: torch.Tensor, largest: float) -> dict[str, Any]:
    """Hooks that scale queries and keys up to a given largest score."""
    scores = hooked.run(ids, points=["scores"])
    seen = max(float(scores["scores", layer][scores["scores", layer] > -1e30].abs().max()) for layer in range(2))
    factor = (largest / seen) ** 0.5
    return {"q": lambda q: q * factor, "k": lambda k: k * factor}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_focus_and_updates_of_large_streams_and_scores(name: str, dtype: torch.dtype) -> None:
    hooked, ids = stressed(name, dtype), models.token_ids(name, batch=3, length=9)
    with hooked.hooks(farther(hooked, ids, 60_000.0)):
        focus, updates = am.stream(
            hooked, ids, [am.results.AttentionFocus.reducer(), am.results.ResidualUpdates.reducer()]
        )
        acts = hooked.run(ids, points=["scores", "pattern", "z", "resid_pre"])
    for layer, head in itertools.product(range(hooked.n_layers), range(hooked.n_heads)):
        pattern = acts["pattern", layer][:, head].double().numpy()
        rows = range(1, ids.shape[1])
        assert not np.isnan(pattern).any()
        first = [pattern[text, row, 0] for text in range(len(ids)) for row in rows]
        assert float(focus.first_mass[layer, head]) == pytest.approx(np.mean(first), abs=2e-3)
        weight = hooked.weights(layer).W_O[head].double()
        written = torch.linalg.vector_norm(acts["z", layer][:, 1:, head].double() @ weight, dim=-1)
        stream = torch.linalg.vector_norm(acts["resid_pre", layer][:, 1:].double(), dim=-1)
        assert float(updates.magnitude[layer, head]) == pytest.approx(float((written / stream).mean()), rel=5e-3)
    assert not any(focus[name].mean.isnan().any() for name in focus.quantities)
    assert not updates.to_frame()[["magnitude", "orientation", "along", "across"]].isna().any(axis=None)


@pytest.mark.parametrize("dtype", HALF)
def test_scores_beyond_the_type_are_exact(dtype: torch.dtype) -> None:
    """Products of ±200,000, which float16 cannot represent, and their softmax."""
    hooked, ids = stressed("gpt2", dtype), models.token_ids("gpt2", batch=2, length=6)
    with hooked.hooks(farther(hooked, ids, 200_000.0)):
        acts = hooked.run(ids, points=["q", "k", "scores", "pattern"])
        focus = am.attention_focus(hooked, ids)
    for layer in range(hooked.n_layers):
        q, k = (acts[name, layer].double() for name in "qk")
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        seen = torch.ones(6, 6, dtype=torch.bool).tril()
        assert torch.allclose(acts["scores", layer].double()[..., seen], scores[..., seen], rtol=1e-5)
        pattern = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        assert torch.allclose(acts["pattern", layer].double(), pattern, atol=2e-2)
        entropy = -(pattern * pattern.clamp_min(1e-300).log()).sum(dim=-1)[:, :, 1:].mean(dim=(0, 2))
        assert torch.allclose(focus.entropy[layer].double(), entropy, atol=2e-2)
    assert float(acts["scores", 0].abs().where(acts["scores", 0] > -1e30, 0).max()) > 65_504


def test_a_model_whose_scores_overflow_is_told_so() -> None:
    model = models.fresh("llama")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(300.0)
    ids = models.token_ids("llama", batch=1, length=6)
    with pytest.warns(UnprovenWarning, match="exceed 65,504, the largest number of float16; load the model with"):
        hooked = am.load(model, dtype=torch.float16)
    with pytest.raises(CertificateError, match="exceed 65,504"):
        hooked.run(ids, points=["pattern"])
    scores, wide = (
        one.run(ids, points=["scores"])["scores", 0] for one in (hooked, am.load(model.float(), dtype=torch.float32))
    )
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    assert float(wide[..., seen].abs().max()) > 65_504
    torch.testing.assert_close(
        scores[..., seen], wide[..., seen], rtol=2e-2, atol=1e-2 * float(wide[..., seen].abs().max())
    )
