"""For random sizes and options of families that have options, the certificate holds and the ledger adds up."""

from collections.abc import Callable
from random import Random
from typing import Any

import models
import pytest
import tiny
import torch
import transformers

import attnmech as am

Lot = Random


def even(lot: Lot) -> int:
    return lot.choice([2, 4, 6, 8, 10])


def flag(lot: Lot) -> bool:
    return lot.random() < 0.5


def groups(lot: Lot, heads: int) -> int:
    return lot.choice([kv for kv in range(1, heads + 1) if heads % kv == 0])


def windows(lot: Lot, layers: int) -> dict[str, Any]:
    kinds = [lot.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return {"sliding_window": lot.randint(1, 6), "layer_types": kinds}


def falcon(lot: Lot) -> Any:
    heads, alibi = lot.randint(1, 7), flag(lot)
    options: dict[str, Any] = {"alibi": alibi, "bias": flag(lot), "multi_query": flag(lot), "parallel_attn": flag(lot)}
    if flag(lot):
        norms = lot.choice([None, 1, 2])
        options |= {"new_decoder_architecture": True, "num_kv_heads": groups(lot, heads), "parallel_attn": True}
        options["num_ln_in_parallel_attn"] = norms
    return models.falcon(heads, even(lot), lot.randint(1, 3), **options)


def like_llama(kind: str, lot: Lot) -> Any:
    heads, layers = lot.randint(1, 6), lot.randint(1, 3)
    # gpt-oss needs rows of a multiple of 16 bytes.
    width = 4 if kind == "GptOss" else lot.choice([2, 4, 6])
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": groups(lot, heads), "hidden": heads * width, "layers": layers}
    if kind == "Qwen2":
        chosen = windows(lot, layers)
        return models.like_llama(kind, **sizes, d_head=None, use_sliding_window=True, **chosen)
    sizes["d_head"] = even(lot)
    if kind == "Qwen3":
        chosen = {"use_sliding_window": True, "attention_bias": flag(lot), **windows(lot, layers)}
    elif kind == "Mistral":
        chosen = {"sliding_window": lot.choice([None, 1, 2, 5, 50])}
    elif kind == "Gemma2":
        caps = {"attn_logit_softcapping": lot.choice([None, 0.7, 5.0]), "query_pre_attn_scalar": lot.randint(1, 40)}
        chosen = {**caps, **windows(lot, layers), "attention_bias": flag(lot)}
        return models.gemma2(**sizes, **chosen)
    elif kind == "GptOss":
        rope = models.YARN if flag(lot) else None
        return models.gpt_oss(rope, **{**sizes, **windows(lot, layers), "attention_bias": flag(lot)})
    else:
        chosen = {"attention_bias": flag(lot), "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    return models.like_llama(kind, **sizes, **chosen)


def opt(lot: Lot) -> Any:
    pre = flag(lot)
    heads, d_head = lot.randint(1, 7), lot.randint(1, 9)
    options = {"do_layer_norm_before": pre, "enable_bias": flag(lot), "word_embed_proj_dim": lot.choice([5, 12])}
    return models.opt(heads, d_head, lot.randint(1, 3), layer_norm_elementwise_affine=flag(lot), **options)


def gpt_neox(lot: Lot) -> Any:
    options = {"use_parallel_residual": flag(lot), "attention_bias": flag(lot)}
    return models.gpt_neox(
        lot.randint(1, 7), lot.choice([8, 12, 16]), lot.randint(1, 3), share=lot.choice([None, 0.25, 0.5, 1.0]),
        **options,
    )  # fmt: skip


def mpt(lot: Lot) -> Any:
    scale = lot.choice([None, 0.3])
    return models.mpt(lot.randint(1, 12), lot.randint(1, 7), lot.randint(1, 3), softmax_scale=scale)


DRAWS: dict[str, Callable[[Lot], Any]] = {
    "falcon": falcon,
    "gemma2": lambda lot: like_llama("Gemma2", lot),
    "gpt_neox": gpt_neox,
    "gpt_oss": lambda lot: like_llama("GptOss", lot),
    "llama": lambda lot: like_llama("Llama", lot),
    "mistral": lambda lot: like_llama("Mistral", lot),
    "mpt": mpt,
    "opt": opt,
    "qwen2": lambda lot: like_llama("Qwen2", lot),
    "qwen3": lambda lot: like_llama("Qwen3", lot),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("family", sorted(DRAWS))
def test_a_config_by_lot(family: str, seed: int) -> None:
    model = models.randomised(DRAWS[family](Random(f"{family} {seed}")), seed=seed)
    assert model.config.model_type == family
    hooked = am.load(model)
    text = f"{model.config.to_diff_dict()}\n{hooked.certificate!r}"
    assert hooked.certificate.ok, text
    allowed = {"implementations", "bridge"} if family == "falcon" and model.config.alibi else {"bridge"}
    assert {check.name for check in hooked.certificate.remarks} <= allowed, text
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(seed))
    split = am.decompose_scores(hooked, ids)
    assert float((split.residual / split.largest.amax(dim=1, keepdim=True)).max()) <= 1e-5
    implementation = "sdpa" if family == "falcon" and model.config.alibi else "eager"
    with torch.no_grad():
        theirs = models.in_attention(model, implementation)(ids).logits
    assert float((hooked.run(ids).logits - theirs).abs().max()) <= 5e-5 * float(theirs.abs().max())


FAR: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "attention_factor": 1.6, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "attention_factor": 0.7, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("qwen3", "linear"), ("qwen3", "dynamic"), ("cohere2", "llama3"), ("smollm3", "yarn"), ("stablelm", "yarn"),
        # Queries and keys are normed before the rotation, whose tables have a factor; or after it (nanochat).
        ("olmo2", "yarn"), ("olmo2", "longrope"), ("olmo3", "yarn"), ("exaone4", "yarn"), ("exaone4", "longrope"),
        ("gemma3_text", "yarn"), ("qwen3_moe", "longrope"), ("nanochat", "yarn"),
    ],
)  # fmt: skip
def test_rotations_for_long_texts_are_those_of_transformers(kind: str, rope: str) -> None:
    config = tiny.config_of(kind)
    of_layers = config.rope_parameters
    nested = any(isinstance(value, dict) for value in of_layers.values())
    for parameters in of_layers.values() if nested else [of_layers]:
        parameters.update(FAR[rope], rope_type=rope)
        if rope == "longrope":
            short = [1 + place / 8 for place in range(config.head_dim // 2 if hasattr(config, "head_dim") else 4)]
            parameters.update(short_factor=short, long_factor=[4 * factor for factor in short])
    model = models.randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = torch.arange(10, 50).view(2, 20)
    hooked = am.load(model)
    assert hooked.certificate.ok and not hooked.refused, repr(hooked.certificate)
    with torch.no_grad():
        theirs = model(ids, output_attentions=True)
    acts = hooked.run(ids, points=["pattern", "logits"])
    torch.testing.assert_close(acts.logits, theirs.logits, rtol=0, atol=5e-5 * float(theirs.logits.abs().max()))
    split = am.decompose_scores(hooked, ids)
    assert float((split.residual / split.largest).max()) <= 1e-5
    for layer, pattern in enumerate(theirs.attentions):
        torch.testing.assert_close(acts["pattern", layer], pattern, rtol=0, atol=1e-5)
    if kind != "qwen3_moe":  # torch multiplies these experts in float32 only
        rounded = am.load(model.bfloat16())
        assert rounded.architecture == hooked.architecture and rounded.certificate.ok, repr(rounded.certificate)
