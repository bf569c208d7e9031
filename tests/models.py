"""Small transformers models with random weights, in which no two axes have the same length, with helpers for tests.

Every parameter is random, biases and norm weights too, so that no fault can hide behind a zero.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import transformers
from caching import cached
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

import attnmech as am


def randomised(model: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model in eval mode with new random parameters; matrices preserve the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if not parameter.requires_grad:  # sines and cosines, which are neither learned nor random
                continue
            if parameter.ndim > 1:
                parameter.copy_(noise if "emb" in name or "wte" in name else noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.5 * noise)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval()


def bloom(heads: int = 3, d_head: int = 10, layers: int = 2) -> Any:
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=heads * d_head, n_layer=layers, n_head=heads, hidden_dropout=0, attention_dropout=0
    )
    return transformers.BloomForCausalLM(config)


def gpt2(heads: int = 5, d_head: int = 4, layers: int = 3) -> Any:
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=19, n_embd=heads * d_head, n_layer=layers, n_head=heads, n_inner=28,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(
    heads: int = 6, kv_heads: int = 2, d_head: int = 8, hidden: int = 36, bias: bool = False, layers: int = 2
) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=hidden, intermediate_size=34, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=d_head, attention_bias=bias, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(heads: int = 3, d_head: int = 7, layers: int = 2, headless: bool = False) -> Any:
    config = transformers.BertConfig(
        vocab_size=59, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=26, max_position_embeddings=23,
    )  # fmt: skip
    return (transformers.BertModel if headless else transformers.BertForMaskedLM)(config)


def mpt(heads: int = 3, d_head: int = 8, layers: int = 2, **attention: Any) -> Any:
    config = transformers.MptConfig(
        vocab_size=57, d_model=heads * d_head, n_heads=heads, n_layers=layers, expansion_ratio=3, max_seq_len=24,
        attn_config=attention,
    )  # fmt: skip
    return transformers.MptForCausalLM(config)


def falcon(heads: int = 6, d_head: int = 6, layers: int = 2, **options: Any) -> Any:
    config = transformers.FalconConfig(
        vocab_size=55, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        ffn_hidden_size=31, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return transformers.FalconForCausalLM(config)


def opt(heads: int = 3, d_head: int = 8, layers: int = 2, **options: Any) -> Any:
    config = transformers.OPTConfig(
        vocab_size=51, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=29,
        max_position_embeddings=33, **{"word_embed_proj_dim": heads * d_head, **options},
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def gpt_neox(heads: int = 3, d_head: int = 8, layers: int = 2, share: float | None = None, **options: Any) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    config = transformers.GPTNeoXConfig(
        vocab_size=49, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=31, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        rope_parameters=None if share is None else rotary, **options,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def gptj(heads: int = 3, d_head: int = 8, layers: int = 2, rotary_dim: int | None = 4) -> Any:
    config = transformers.GPTJConfig(
        vocab_size=43, n_positions=32, n_embd=heads * d_head, n_layer=layers, n_head=heads, n_inner=29,
        rotary_dim=rotary_dim, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPTJForCausalLM(config)


def codegen(heads: int = 4, d_head: int = 6, layers: int = 2) -> Any:
    config = transformers.CodeGenConfig(
        vocab_size=43, n_positions=32, n_embd=heads * d_head, n_layer=layers, n_head=heads, n_inner=29, rotary_dim=4,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.CodeGenForCausalLM(config)


def gpt_neo(heads: int = 3, d_head: int = 8) -> Any:
    config = transformers.GPTNeoConfig(
        vocab_size=43, max_position_embeddings=32, hidden_size=heads * d_head, num_layers=2, num_heads=heads,
        intermediate_size=29, attention_types=[[["global", "local"], 1]], window_size=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config)


def like_llama(
    family: str, heads: int = 6, kv_heads: int = 2, d_head: int | None = 8, hidden: int = 36, layers: int = 2,
    **options: Any,
) -> Any:  # fmt: skip
    """Families whose config is Llama's with options of their own."""
    head_dim = {} if d_head is None else {"head_dim": d_head}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=47, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **{"max_position_embeddings": 64, "intermediate_size": 34, **head_dim, **options},
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config)


def gemma2(**options: Any) -> Any:
    small = {"sliding_window": 3, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
    return like_llama("Gemma2", **{"query_pre_attn_scalar": 11, **small, **options})


def gpt_oss(rope: dict[str, Any] | None = None, **options: Any) -> Any:
    chosen = {
        "sliding_window": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 28,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10_000.0}, **options,
    }  # fmt: skip
    return like_llama("GptOss", **chosen)


def roberta(heads: int = 3, d_head: int = 7, layers: int = 2, kind: str = "Roberta") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=59, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=26, max_position_embeddings=23, type_vocab_size=2, pad_token_id=1,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForMaskedLM")(config)


def deberta(heads: int = 3, d_head: int = 7, layers: int = 2, **options: Any) -> Any:
    config = transformers.DebertaConfig(
        vocab_size=59, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=26, type_vocab_size=0,
        **{"position_biased_input": False, "max_position_embeddings": 140, "relative_attention": True,
           "max_relative_positions": 4, "pos_att_type": "c2p|p2c", **options},
    )  # fmt: skip
    return transformers.DebertaForMaskedLM(config)


def deberta_v2(heads: int = 3, d_head: int = 7, layers: int = 2, **options: Any) -> Any:
    config = transformers.DebertaV2Config(
        vocab_size=59, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=26,
        **{"position_biased_input": False, "max_position_embeddings": 140, "relative_attention": True,
           "max_relative_positions": 6, "position_buckets": 4, "pos_att_type": "p2c|c2p", "share_att_key": True,
           "norm_rel_ebd": "layer_norm",
           "type_vocab_size": 0, **options},
    )  # fmt: skip
    return transformers.DebertaV2ForMaskedLM(config)


def big_bird(kind: str = "ForMaskedLM", attention_type: str = "original_full", **options: Any) -> Any:
    """Sparse attention would see 4 · (5 + 2) = 28 tokens."""
    config = transformers.BigBirdConfig(
        vocab_size=43, hidden_size=21, num_hidden_layers=2, num_attention_heads=3, intermediate_size=26,
        max_position_embeddings=64, block_size=4, num_random_blocks=1, attention_type=attention_type, **options,
    )  # fmt: skip
    return getattr(transformers, f"BigBird{kind}")(config)


MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "bloom": bloom,
    "bloom5": lambda: bloom(heads=5, d_head=4),
    "bloom12": lambda: bloom(heads=12, d_head=2, layers=1),
    "bloom4": lambda: bloom(heads=4, d_head=6),
    "gpt2": gpt2,
    "llama": llama,
    "llama_bias": lambda: llama(heads=4, kv_heads=2, d_head=6, hidden=20, bias=True, layers=3),
    "bert": bert,
    "bert_headless": lambda: bert(headless=True),
}

FAMILIES: Final = ("bloom", "gpt2", "llama", "llama_bias", "bert")
"""One model of each family with a separate layout, and Llama with and without biases."""

YARN: Final = {
    "rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip

NEW: Final[dict[str, Callable[[], Any]]] = {
    "bloom6": lambda: bloom(heads=6, d_head=4),
    "mpt3": mpt,
    "mpt4": lambda: mpt(heads=4, d_head=6),
    "mpt6": lambda: mpt(heads=6, d_head=4),
    "falcon_alibi_serial": lambda: falcon(alibi=True, parallel_attn=False, multi_query=False, bias=True),
    "falcon_alibi_parallel": lambda: falcon(heads=4, d_head=8, alibi=True, parallel_attn=True, multi_query=False),
    "falcon_alibi_multi_query": lambda: falcon(heads=3, d_head=8, alibi=True, multi_query=True),
    "falcon_multi_query": lambda: falcon(multi_query=True, bias=True),
    "falcon_rotary_serial": lambda: falcon(heads=3, d_head=8, multi_query=False, parallel_attn=False, bias=True),
    "falcon_new": lambda: falcon(new_decoder_architecture=True, num_kv_heads=3, bias=True),
    "falcon_new_one_norm": lambda: falcon(new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1),
    "opt": opt,
    "opt_post": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=10),
    "gpt_neox": gpt_neox,
    "gpt_neox_serial": lambda: gpt_neox(share=0.5, use_parallel_residual=False, attention_bias=False),
    "gptj": gptj,
    "gptj_full": lambda: gptj(heads=5, d_head=6, rotary_dim=6),
    "mistral": lambda: like_llama("Mistral", sliding_window=3),
    "qwen2": lambda: like_llama("Qwen2", d_head=None, heads=6, kv_heads=3),
    "qwen3": lambda: like_llama("Qwen3", attention_bias=False),
    "qwen3_bias": lambda: like_llama("Qwen3", attention_bias=True, kv_heads=3),
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "gpt_oss_yarn": lambda: gpt_oss(YARN, layers=1),
    "roberta": roberta,
    "xlm_roberta": lambda: roberta(heads=2, d_head=9, kind="XLMRoberta"),
    "deberta": deberta,
    "deberta_v2": deberta_v2,
    "deberta_v2_own_projections": lambda: deberta_v2(
        heads=2, d_head=9, share_att_key=False, position_buckets=-1, norm_rel_ebd="none", type_vocab_size=2
    ),
}
"""Models of further families, for tests/families."""


def t5(kind: str = "T5ForConditionalGeneration", config: str = "T5Config") -> Any:
    made = getattr(transformers, config)(
        vocab_size=43, d_model=21, d_kv=5, d_ff=17, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=6, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return getattr(transformers, kind)(made)


def vit(kind: str = "ViTForImageClassification") -> Any:
    config = transformers.ViTConfig(
        hidden_size=15, num_hidden_layers=2, num_attention_heads=3, intermediate_size=22, image_size=(8, 12),
        patch_size=4, num_channels=2, num_labels=6,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


HYBRID: Final[dict[str, Any]] = {
    "vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 28,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def jamba() -> Any:
    config = transformers.JambaConfig(
        **HYBRID, attn_layer_period=2, attn_layer_offset=1, num_experts=2, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=3,
    )  # fmt: skip
    return transformers.JambaForCausalLM(config)


def bamba() -> Any:
    config = transformers.BambaConfig(
        **HYBRID, attn_layer_indices=[1, 3], mamba_n_heads=4, mamba_d_head=12, mamba_n_groups=1, mamba_d_state=4
    )
    return transformers.BambaForCausalLM(config)


def lfm2() -> Any:
    config = transformers.Lfm2Config(
        **HYBRID, layer_types=["conv", "full_attention", "conv", "full_attention"], block_auto_adjust_ff_dim=False
    )
    return transformers.Lfm2ForCausalLM(config)


def xlnet(heads: int = 4, d_head: int = 6, layers: int = 3, **options: Any) -> Any:
    config = transformers.XLNetConfig(
        vocab_size=53, d_model=heads * d_head, n_layer=layers, n_head=heads, d_inner=26, **options
    )
    return transformers.XLNetLMHeadModel(config)


def seq2seq(family: str, d_model: int, heads: tuple[int, int], kind: str = "", **options: Any) -> Any:
    """BART and its relatives: two layers with `heads[0]` heads in the encoder, three with `heads[1]` in the decoder."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=43, d_model=d_model, encoder_layers=2, decoder_layers=3, encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1], encoder_ffn_dim=17, decoder_ffn_dim=19, max_position_embeddings=33,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
           "forced_eos_token_id": None, **options},
    )  # fmt: skip
    return getattr(transformers, kind or f"{family}ForConditionalGeneration")(config)


def longformer(kind: str = "ForMaskedLM", windows: tuple[int, ...] = (4, 8, 4)) -> Any:
    config = transformers.LongformerConfig(
        vocab_size=59, hidden_size=21, num_hidden_layers=len(windows), num_attention_heads=3, intermediate_size=26,
        max_position_embeddings=70, type_vocab_size=2, pad_token_id=1, sep_token_id=2, attention_window=[*windows],
    )  # fmt: skip
    return getattr(transformers, f"Longformer{kind}")(config)


def led(windows: tuple[int, ...] = (4, 8), **options: Any) -> Any:
    config = transformers.LEDConfig(
        vocab_size=43, d_model=24, encoder_layers=len(windows), decoder_layers=3, encoder_attention_heads=3,
        decoder_attention_heads=4, encoder_ffn_dim=17, decoder_ffn_dim=19, max_encoder_position_embeddings=140,
        max_decoder_position_embeddings=33, attention_window=[*windows], pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, **options,
    )  # fmt: skip
    return transformers.LEDForConditionalGeneration(config)


OTHERS: Final[dict[str, Callable[[], Any]]] = {
    "t5": t5,
    "t5_encoder_alone": lambda: t5("T5EncoderModel"),
    "mt5": lambda: t5("MT5ForConditionalGeneration", "MT5Config"),
    "mvp": lambda: seq2seq("Mvp", 28, (4, 7)),
    "vit": vit,
    "vit_headless": lambda: vit("ViTModel"),
    "jamba": jamba,
    "bamba": bamba,
    "lfm2": lfm2,
    "codegen": codegen,
    "gpt_neo": gpt_neo,
    "xlnet": xlnet,
    "longformer": longformer,
    "led": led,
}
"""Models with several stacks, models of images, hybrids, and others with separate tests."""


CROSSED: Final[dict[str, Callable[[], Any]]] = {
    "bart": lambda: seq2seq("Bart", 24, (3, 4)),
    "marian": lambda: seq2seq("Marian", 20, (5, 2), "MarianMTModel", scale_embedding=True, forced_eos_token_id=None),
    "mbart": lambda: seq2seq("MBart", 18, (2, 3), scale_embedding=True),
}
"""Encoder-decoders whose three stacks are read: post-norm, post-norm with sinusoids, pre-norm."""

SINGLE_ONLY: Final = ("gpt_oss", "gpt_oss_yarn", "jamba")
"""Models that transformers cannot run in float64."""


def fresh(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A separate model, for tests that change it."""
    return randomised((MAKERS | NEW | OTHERS | CROSSED)[name](), dtype=dtype, seed=seed)


@cached
def plain(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, shared by all tests, which must not change it.

    In eager attention, except for Falcon with ALiBi, which eager attention counts twice.
    """
    return in_attention(fresh(name, dtype), "sdpa" if name.startswith("falcon_alibi") else "eager")


def in_attention(model: Any, implementation: str) -> Any:
    """The model, set to one of transformers' attention implementations."""
    # Falcon does not let `set_attn_implementation` choose.
    model.config._attn_implementation = implementation
    return model


@cached
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    """attnmech's model of the same weights, shared by all tests."""
    return am.load(fresh(name, dtype))


@cache
def _demo() -> tuple[am.HookedModel, list[int]]:
    model = am.load()
    return model, _changes(model)


def _changes(model: am.HookedModel) -> list[int]:
    """The number of writes to each parameter."""
    return [parameter._version for parameter in model._model.parameters()]


def demo() -> am.HookedModel:
    """The demo model, shared by all tests; a changed weight fails the next test."""
    model, changes = _demo()
    assert _changes(model) == changes and "forward" not in vars(model), "a test has changed the shared demo model"
    return model


def token_ids(name: str, batch: int = 3, length: int = 7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, plain(name).config.vocab_size, (batch, length), generator=generator)


def texts_of(count: int = 7, length: int = 15, seed: int = 0, vocabulary: int = 40, step: int = 1) -> list[Tensor]:
    """Token ids that every model knows, in texts of different lengths: `length`, `length - step`, ..."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (1, length - step * text), generator=generator) for text in range(count)]


def padded(name: str, side: str = "right", batch: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Sequences of length, length − 2, length − 4, ..., padded on one side."""
    mask = torch.zeros(batch, length, dtype=torch.long)
    for row in range(batch):
        here = length - 2 * row
        if side == "right":
            mask[row, :here] = 1
        else:
            mask[row, length - here :] = 1
    return {"input_ids": token_ids(name, batch, length), "attention_mask": mask}


def blocks_of(model: Any) -> nn.ModuleList:
    """The list of blocks of a transformers model, wherever it is."""
    base = model.base_model
    albert = "encoder.albert_layer_groups.0.albert_layers"
    for path in ("h", "layers", "encoder.layer", "blocks", "decoder.layers", albert):
        try:
            return base.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(f"no blocks in {type(model).__name__}")


WORDS: Final = (
    "[PAD]", "[UNK]", "[BOS]", "the", "keys", "to", "cabinet", "are", "here", "there", "and", "a", "dog", ".",
)  # fmt: skip


def tokenizer(*, has_bos: bool = False, adds_bos: bool = False, words: tuple[str, ...] = WORDS) -> Any:
    """A tokenizer of whole words; optionally with a BOS token, and with BOS added to every text."""
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    special = {"bos_token": "[BOS]"} if has_bos or adds_bos else {}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]", **special)


def inputs_of(name: str) -> dict[str, Tensor]:
    """Inputs for a model of any kind: padded texts, with tokens for a decoder if it has one, or images."""
    config = plain(name).config
    if name.startswith("vit"):
        generator = torch.Generator().manual_seed(1)
        return {"pixel_values": torch.randn(3, config.num_channels, *config.image_size, generator=generator)}
    given = padded(name)
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = token_ids(name, length=5, seed=2)
    return given
