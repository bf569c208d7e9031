"""Unsupported and inconsistent models are refused in one line that names them and gives the reason."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import CertificateError, InputError, UnsupportedModelError, WeightsError

TINY: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 20,
}  # fmt: skip
INDEXED: dict[str, Any] = {
    **TINY, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 0, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
SSM: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SSM)), "without attention"),
    "mamba2": (
        lambda: transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SSM, num_heads=4, head_dim=8, n_groups=1)),
        "carry a state from token to token",
    ),
    "rwkv": (
        lambda: transformers.RwkvForCausalLM(
            transformers.RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
        ),
        "without attention",
    ),
    "big_bird": (
        lambda: transformers.BigBirdForMaskedLM(
            transformers.BigBirdConfig(**TINY, max_position_embeddings=64, block_size=4, num_random_blocks=1)
        ),
        "attention is sparse",
    ),
    "deepseek_v32": (
        lambda: transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**INDEXED, n_group=2, topk_group=1)),
        "attention is sparse",
    ),
    "diffllama": (
        lambda: transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**TINY, num_key_value_heads=2)),
        "differential attention",
    ),
}

OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "MPT": (lambda: models.mpt(clip_qkv=2.0), "clip_qkv"),
    "Gemma 2": (lambda: models.gemma2(use_bidirectional_attention=True), "use_bidirectional_attention"),
    "BLOOM": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(
                vocab_size=40, hidden_size=16, n_layer=1, n_head=4, apply_residual_connection_post_layernorm=True
            )
        ),
        "apply_residual_connection_post_layernorm",
    ),
    "GPT-2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=40, n_embd=20, n_layer=1, n_head=4, add_cross_attention=True, bos_token_id=1, eos_token_id=2
            )
        ),
        "add_cross_attention",
    ),
}


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.strip() == text and "\n" not in text and text.endswith("."), text
    return text


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_refused_by_name_with_the_reason(family: str) -> None:
    make, reason = REFUSED[family]
    model = make()
    with pytest.raises(UnsupportedModelError) as caught:
        am.load(model)
    text = one_line(caught.value)
    assert f"model_type {family!r}" in text and type(model).__name__ in text and reason in text
    # No weight was changed, and nothing was attached.
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_folder_of_a_refused_family_says_the_same(family: str, tmp_path: Path) -> None:
    make, reason = REFUSED[family]
    make().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        am.load(tmp_path)
    text = one_line(caught.value)
    assert family in text and reason in text


@pytest.mark.parametrize("family", sorted(OPTIONS))
def test_options_refused_by_name(family: str) -> None:
    make, option = OPTIONS[family]
    with pytest.raises(UnsupportedModelError) as caught:
        am.load(make())
    assert option in one_line(caught.value)


# -- bad input -----------------------------------------------------------------------------------------------


IMPOSSIBLE: dict[str, Callable[[], Any]] = {
    "kv heads that do not divide the heads": lambda: models.like_llama("Qwen2", d_head=None, kv_heads=4),
    "falcon kv heads that do not divide the heads": lambda: models.falcon(
        new_decoder_architecture=True, num_kv_heads=4
    ),
    "falcon kv heads without the new architecture": lambda: models.falcon(multi_query=False, num_kv_heads=2),
    "falcon two norms without the new architecture": lambda: models.falcon(num_ln_in_parallel_attn=2),
    "falcon new architecture in serial": lambda: models.falcon(
        new_decoder_architecture=True, num_kv_heads=3, parallel_attn=False
    ),
    "gptj rotary wider than the head": lambda: models.gptj(rotary_dim=12),
    "gptj rotary of odd width": lambda: models.gptj(rotary_dim=3),
    "gpt-oss rows that are not a multiple of 16 bytes": lambda: models.gpt_oss(None, hidden=18),
    "roberta without a padding token": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**TINY, max_position_embeddings=23, pad_token_id=None)
    ),
    "no layers": lambda: models.like_llama("Qwen3", layers=0),
}


@pytest.mark.parametrize("what", sorted(IMPOSSIBLE))
def test_impossible_sizes_are_one_clear_error(what: str) -> None:
    model = models.randomised(IMPOSSIBLE[what]())
    with pytest.raises(am.AttnmechError) as caught:
        am.load(model)
    text = one_line(caught.value)
    # The model is already in float32, so that cannot be the advice.
    assert "Try dtype=torch.float32" not in text


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("opt", "num_attention_heads", 5), ("bloom6", "n_head", 5), ("falcon_multi_query", "num_attention_heads", 5)],
)
def test_a_config_that_does_not_fit_the_weights(name: str, option: str, value: int) -> None:
    model = models.fresh(name)
    setattr(model.config, option, value)
    with pytest.raises(am.AttnmechError) as caught:
        am.load(model)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_attention_heads", 5), ("num_attention_heads", 0), ("num_attention_heads", -6), ("hidden_size", 37),
        ("hidden_size", "36"), ("num_key_value_heads", 0), ("num_hidden_layers", 5), ("vocab_size", 3),
        ("model_type", "nosuch"),
    ],
)  # fmt: skip
def test_a_folder_whose_config_cannot_be(option: str, value: Any, tmp_path: Path) -> None:
    models.fresh("qwen2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {option: value}))
    with pytest.raises(am.AttnmechError) as caught:
        am.load(tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text and "\n" not in text
    assert "the above report" not in text


@pytest.mark.parametrize("name", ["opt", "mpt3", "gemma2", "falcon_new"])
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(name: str) -> None:
    words = (*models.WORDS, *(f"w{n}" for n in range(60)))
    with pytest.raises(InputError) as caught:
        am.load(models.fresh(name), tokenizer=models.tokenizer(words=words))
    rows = models.plain(name).get_input_embeddings().weight.shape[0]
    assert f"the tokenizer has {len(words)} tokens, but the model's embedding has {rows} rows" in one_line(caught.value)


class WithoutWeight(nn.Module):
    """A projection that stores its matrix elsewhere, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class InBytes(nn.Module):
    """A projection with an integer matrix, as in quantised models."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter((inner.weight * 50).to(torch.int8), requires_grad=False)
        self.bias = inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x) / 50, self.bias)


@pytest.mark.parametrize("kind", [WithoutWeight, InBytes])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("qwen2", "self_attn.q_proj"), ("opt", "self_attn.out_proj"),
        ("falcon_multi_query", "self_attention.query_key_value"),
    ],
)  # fmt: skip
def test_a_projection_without_a_plain_matrix(name: str, path: str, layer: int, kind: Any) -> None:
    model = models.fresh(name)
    block = models.blocks_of(model)[layer]
    block.set_submodule(path, kind(block.get_submodule(path)))
    with pytest.raises((UnsupportedModelError, WeightsError)) as caught:
        am.load(model)
    told = {
        WithoutWeight: ("of kind WithoutWeight", "quantised or adapted"),
        InBytes: (f"{path}.weight is int8", "without quantisation"),
    }
    assert all(words in one_line(caught.value) for words in told[kind])


def test_a_model_that_rounds_its_inputs_loads_with_its_points_refused() -> None:
    """Dynamic quantisation: one scale for a whole batch, so a projection multiplies by no matrix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(models.fresh("qwen2"), {nn.Linear}, dtype=torch.qint8)
        hooked = am.load(model)
    assert {"padding", "projections"} <= {check.name for check in hooked.certificate.failed}
    assert {"q", "k", "v", "scores", "pattern", "z", "logits"} <= hooked.refused.keys()
    with pytest.raises(CertificateError, match="point 'q' is refused on this model"):
        hooked.run(models.token_ids("qwen2"), points=["q"])


def test_gpt_oss_in_float64_says_what_transformers_cannot_do() -> None:
    with pytest.raises(WeightsError) as caught:
        am.load(models.fresh("gpt_oss", torch.float64))
    text = one_line(caught.value)
    assert "transformers cannot run GptOssForCausalLM in float64" in text and "Try dtype=torch.float32" in text


@pytest.mark.parametrize("make", ["BertForSequenceClassification", "OPTForSequenceClassification"])
def test_a_head_that_gives_one_answer_a_text(make: str) -> None:
    source = models.bert() if make.startswith("Bert") else models.opt()
    model = models.randomised(getattr(transformers, make)(source.config))
    hooked, ids = am.load(model), torch.arange(3, 9)[None]
    assert hooked.certificate.ok, repr(hooked.certificate)
    with torch.no_grad():
        torch.testing.assert_close(hooked.run(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_head_without_logits_is_refused_by_name() -> None:
    model = models.randomised(transformers.BertForQuestionAnswering(models.bert().config))
    with pytest.raises(UnsupportedModelError) as caught:
        am.load(model)
    assert "am.load(model.base_model)" in one_line(caught.value)
    assert am.load(model.base_model).certificate.ok


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_attention_that_transformers_cannot_do_is_not_what_we_are_compared_with(name: str) -> None:
    """sdpa supports neither soft caps nor sinks: transformers raises for one and ignores the other."""
    hooked = am.load(models.in_attention(models.fresh(name), "sdpa"))
    assert hooked.certificate.ok, repr(hooked.certificate)
    torch.testing.assert_close(
        hooked.run(torch.arange(3, 9)[None]).logits, models.hooked(name).run(torch.arange(3, 9)[None]).logits
    )
