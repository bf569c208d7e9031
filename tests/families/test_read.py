"""Families whose structure is read from a traced pass, against plain transformers and their raw weights."""

from typing import Any

import models
import pytest
import tiny
import torch
import transformers
from comparing import close
from torch import Tensor
from transformers.models.cohere import modeling_cohere

import attnmech as am
from attnmech.model.files.load import UnprovenWarning

F32, F64 = torch.float32, torch.float64
INPUTS = {"input_ids": torch.randint(10, 80, (2, 9), generator=torch.Generator().manual_seed(7))}


# -- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama4_text", "modernbert"])
def test_families_that_rotate_in_float32_are_certified_in_float64(kind: str) -> None:
    """Their queries and keys are in float32, and so is the ledger's tolerance; a slightly larger error fails."""
    model = am.load(tiny.model_of(kind, dtype=F64))
    assert model.certificate.ok, repr(model.certificate)
    split = am.decompose_scores(model, INPUTS)
    assert 1e-12 < float((split.residual / split.largest).max()) <= 1e-6


def test_a_rotation_in_float32_excuses_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplies keys by 1 + 1e-5, in float32: a hundred roundings."""
    rotate = modeling_cohere.apply_rotary_pos_emb

    def larger(q: Tensor, k: Tensor, *tables: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, *tables, **options)
        return q, (k.float() * (1 + 1e-5)).to(k)

    monkeypatch.setattr(modeling_cohere, "apply_rotary_pos_emb", larger)
    with pytest.warns(UnprovenWarning):
        model = am.load(tiny.model_of("cohere", dtype=F64))
    assert {"rotary", "ledger"} <= {check.name for check in model.certificate.failed}


@pytest.mark.parametrize("kind", ["phi3", "falcon_h1", "nanochat", "minicpm3"])
def test_in_bfloat16(kind: str) -> None:
    raw = tiny.model_of(kind, dtype=torch.bfloat16)
    model = am.load(raw)
    assert model.certificate.ok, repr(model.certificate)
    assert model.architecture == am.load(tiny.model_of(kind)).architecture
    with torch.no_grad():
        close(model.run(INPUTS).logits, raw(**INPUTS, use_cache=False).logits, 0.05)


# -- queries scaled by position -------------------------------------------------------------------------------


MADE = {
    "ministral3": transformers.Ministral3ForCausalLM,
    "mistral4": transformers.Mistral4ForCausalLM,
    "llama4_text": transformers.Llama4ForCausalLM,
}


def scaled_by_position(kind: str, beta: float) -> Any:
    """A model whose queries have another factor from token 16 on (Llama 4: 15)."""
    config = tiny.config_of(kind)
    config.max_position_embeddings = 128
    if kind == "llama4_text":
        config.floor_scale, config.attn_scale = 16, beta
    else:
        length = {"original_max_position_embeddings": 16, "factor": 8.0, "llama_4_scaling_beta": beta}
        if kind == "mistral4":
            length["partial_rotary_factor"] = config.qk_rope_head_dim / config.head_dim
            config.num_key_value_heads = config.num_attention_heads
        config.rope_parameters = {**config.rope_parameters, **length}
    torch.manual_seed(0)
    return models.randomised(MADE[kind]._from_config(config, dtype=F32))


@pytest.mark.parametrize("kind", MADE)
def test_queries_are_scaled_by_position(kind: str) -> None:
    raw, layer = scaled_by_position(kind, 0.5), 3 if kind == "llama4_text" else 0
    model, unscaled = am.load(raw), am.load(scaled_by_position(kind, 0.0))
    ids = torch.randint(10, 80, (2, 40), generator=torch.Generator().manual_seed(7))
    assert model.certificate.ok, repr(model.certificate)
    with torch.no_grad():
        close(model.run(ids).logits, raw(input_ids=ids, use_cache=False).logits, 1e-4)
    query, plain = (am.decompose_scores(one, ids).parts[layer].query for one in (model, unscaled))
    factor = 1 + 0.5 * torch.log1p((torch.arange(40) + (kind == "llama4_text")) // 16)
    close(query, factor[:, None] * plain, 1e-4)
    padded = torch.ones_like(ids)
    padded[1, :9] = 0
    am.decompose_scores(model, {"input_ids": ids, "attention_mask": padded})
    am.variance_shares(model, ids)
