"""Unsupported and inconsistent models are refused in one line that names them and gives the reason."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import tiny
import torch
import transformers
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import CertificateError, UnsupportedModelError, WeightsError

SPARSE = "attention is sparse"
REFUSED = {
    "mamba": "without attention", "mamba2": "carry a state from token to token", "rwkv": "without attention",
    "fnet": "a model without attention", "deepseek_v32": SPARSE, "big_bird": SPARSE,
    "diffllama": "(differential attention)", "jetmoe": "its q are not columns of one projection",
    "longcat_flash": "layers.N.self_attn.0, layers.N.self_attn.1",
    "hrm_text": "its attention is in more than one place",
    "neomme": "reads neither z nor z times a known gate (a norm of z?)",
    "convbert": "comes from a convolution, not from attention", "cpmant": "its own prompt tokens",
    "doge": "a function of the values to the scores", "funnel": "pools positions", "ibert": "quantised",
    "mra": "approximates the softmax", "xlm": "in separate lists", "nystromformer": "by landmarks",
    "squeezebert": "convolutions", "yoso": "by hashing", "axk2": "an indexer selects",
    "t5gemma": "a norm comes between its cross-attention and the stream", "t5gemma2": "in one softmax",
    "nllb-moe": "depends on other texts", "prophetnet": "several streams", "pegasus_x": "global tokens",
}  # fmt: skip
"""Model types that cannot be read exactly, and why."""

SHARED = "supported: its last 2 layers have no W_K and W_V of their own"
OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "Gemma 3n": (lambda: sharing("gemma3n_text"), SHARED),
    "Gemma 4": (lambda: sharing("gemma4_text"), SHARED),
    "MPT": (lambda: models.mpt(clip_qkv=2.0), "clip_qkv"),
    "XLNet's halves of a text": (lambda: models.xlnet(bi_data=True), "bi_data"),
    "XLNet in one direction": (lambda: models.xlnet(attn_type="uni"), "attn_type='uni'"),
    "DeBERTa's heads": (lambda: models.deberta(talking_head=True), "talking_head=True"),
    "DeBERTa's embedding": (lambda: models.deberta(embedding_size=9), "embedding_size"),
    "DeBERTa's positions": (lambda: models.deberta(pos_att_type=["p2p"]), "p2p"),
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


def sharing(kind: str) -> Any:
    """A model whose last two layers use the keys and values of earlier layers."""
    config = tiny.config_of(kind)
    config.num_kv_shared_layers, config.layer_types = 2, ["sliding_attention", "full_attention"] * 2
    return getattr(transformers, tiny.class_of(kind))(config)


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.strip() == text and "\n" not in text and text.endswith("."), text
    return text


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    model = tiny.model_of(kind)
    sources = [model, tmp_path] if kind in ("rwkv", "deepseek_v32", "neomme") else [model]
    for source in sources:
        with pytest.raises(UnsupportedModelError) as caught:
            am.load(source)
        text = one_line(caught.value)
        assert kind in text and REFUSED[kind] in text
        assert source is tmp_path or text.startswith(f"{type(model).__name__} (model_type {kind!r}) is not ")
        if source is model and len(sources) > 1:
            model.save_pretrained(tmp_path)
    # No weight was changed, and nothing was attached.
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


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
        transformers.RobertaConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, pad_token_id=None)
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
        ("num_attention_heads", 5), ("hidden_size", "36"), ("num_key_value_heads", 0), ("model_type", "nosuch"),
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


class WithoutWeight(nn.Module):
    """A projection that stores its matrix elsewhere, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("name", "path", "layer"),
    [("qwen2", "self_attn.q_proj", 0), ("opt", "self_attn.out_proj", 1),
     ("falcon_multi_query", "self_attention.query_key_value", 1)],
)  # fmt: skip
def test_a_projection_without_a_plain_matrix(name: str, path: str, layer: int) -> None:
    model = models.fresh(name)
    block = models.blocks_of(model)[layer]
    block.set_submodule(path, WithoutWeight(block.get_submodule(path)))
    with pytest.raises(UnsupportedModelError) as caught:
        am.load(model)
    assert all(words in one_line(caught.value) for words in ("of kind WithoutWeight", "quantised or adapted"))


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


# -- sparse attention ------------------------------------------------------------------------------------------


def big_bird(attention_type: str = "original_full") -> Any:
    return models.randomised(models.big_bird(attention_type=attention_type))


def texts(length: int = 41) -> dict[str, Tensor]:
    """Texts longer than the reach of sparse attention; the second is padded."""
    real = torch.ones(2, length, dtype=torch.long)
    real[1, length - 6 :] = 0
    ids = torch.randint(3, 43, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": real}


def outputs(model: Any, length: int = 41) -> Any:
    with torch.no_grad():
        return model(**texts(length))


def test_sparse_attention_is_refused(tmp_path: Path) -> None:
    model = big_bird("block_sparse")
    assert model.bert.attention_type == "block_sparse"
    with pytest.raises(UnsupportedModelError, match="attention is sparse") as caught:
        am.load(model)
    assert "BigBirdForMaskedLM.from_pretrained(folder, attention_type='original_full')" in str(caught.value)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention is sparse"):
        am.load(tmp_path)
    # The remedy in the message.
    full = transformers.BigBirdForMaskedLM.from_pretrained(tmp_path, attention_type="original_full")
    found = am.load(full.eval())
    assert found.certificate.ok
    torch.testing.assert_close(found.run(texts()).logits[0], outputs(big_bird()).logits[0], atol=3e-5, rtol=1e-4)


def test_what_counts_is_what_runs_and_not_the_config() -> None:
    """On the first short text, transformers replaces sparse attention with full attention, permanently."""
    switched = big_bird("block_sparse")
    outputs(switched, length=20)
    assert switched.config.attention_type == "block_sparse" and switched.bert.attention_type == "original_full"
    found = am.load(switched)
    assert found.certificate.ok
    torch.testing.assert_close(found.run(texts()).logits[0], outputs(switched).logits[0], atol=3e-5, rtol=1e-4)
    back = big_bird("original_full")
    back.bert.set_attention_type("block_sparse")
    assert back.config.attention_type == "original_full"
    with pytest.raises(UnsupportedModelError, match="attention is sparse"):
        am.load(back)
