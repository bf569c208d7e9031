"""The table of families: the architecture of well-known families, and of those with their own attention code or inputs.

A model that is not built as its family is fails its certificate. The architecture of any other family is read from the
model (`structure.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import torch

from ...errors import UnsupportedModelError
from ..attention.local_global import LongformerAttention, with_halves, with_halves_in_encoder
from ..attention.postponed import through_attend
from ..attention.relative_positions import (
    DisentangledAttention,
    FirstDisentangledAttention,
    XLNetAttention,
    XLNetCore,
    why_not,
)
from ..attention.replaced_attention import CodeGenAttention, GPTJAttention, GPTNeoAttention, codegen_layout
from ..parts.gates import HalfOfRow
from ..parts.position import HALVES, PAIRS, Alibi
from ..parts.weights import Columns, Fused, Layout, Separate
from .architecture import Architecture

Config: TypeAlias = Any  # a transformers config; its entries depend on the family


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedModelError(f"a model with {reason} is not supported.")


_NORMS: Final = ("input_layernorm", "post_attention_layernorm")

_FIELDS: Final = ("blocks", "final_norm", "attention", "out", "attn_norm", "mid_norm", "mlp_out")
_PATHS: Final[Mapping[str, tuple[str | None, ...]]] = {  # in the order of `_FIELDS`
    "BLOOM": ("h", "ln_f", "self_attention", "self_attention.dense", *_NORMS, "mlp.dense_4h_to_h"),
    "Falcon": ("h", "ln_f", "self_attention", "self_attention.dense", *_NORMS, "mlp"),
    "GPT-2": ("h", "ln_f", "attn", "attn.c_proj", "ln_1", "ln_2", "mlp"),
    "GPT-J": ("h", "ln_f", "attn", "attn.out_proj", "ln_1", None, "mlp"),
    "GPT-Neo": ("h", "ln_f", "attn.attention", "attn.attention.out_proj", "ln_1", "ln_2", "mlp"),
    "GPT-NeoX": ("layers", "final_layer_norm", "attention", "attention.dense", *_NORMS, "mlp"),
    "Llama": ("layers", "norm", "self_attn", "self_attn.o_proj", *_NORMS, "mlp"),
    "MPT": ("blocks", "norm_f", "attn", "attn.out_proj", "norm_1", "norm_2", "ffn.down_proj"),
    "MVP": ("encoder.layers", None, "self_attn", "self_attn.out_proj", None, "self_attn_layer_norm", "fc2"),
    "XLNet": ("layer", None, "rel_attn.core", "rel_attn.core.out", None, "rel_attn.layer_norm", "ff.layer_2"),
}


def _family(family: str, qkv: Layout, **further: Any) -> Architecture:
    paths: dict[str, Any] = dict(zip(_FIELDS, _PATHS[family], strict=True))
    return Architecture(**{"name": family, "qkv": qkv, **paths, **further})


def _bloom(config: Config) -> Architecture:
    if config.apply_residual_connection_post_layernorm:
        _refuse("apply_residual_connection_post_layernorm=True (the stream itself is normalised in every block)")
    return _family(
        "BLOOM",
        Fused("query_key_value", "head qkv d_head"),
        embed_norm="word_embeddings_layernorm",
        alibi=Alibi(),
        replacement=through_attend,
    )


def _mpt(config: Config) -> Architecture:
    if config.attn_config.clip_qkv:
        _refuse("clip_qkv (clipped queries and keys are not a sum of terms)")
    return _family(
        "MPT",
        Fused("Wqkv", "qkv head d_head"),
        alibi=Alibi(from_end=True),
        replacement=through_attend,
        position_limit=config.max_seq_len,
    )


def _falcon(config: Config) -> Architecture:
    heads = int(config.num_attention_heads)
    shared = config.new_decoder_architecture or not config.multi_query
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    serial = not (config.parallel_attn or config.new_decoder_architecture)
    kv_heads = int(config.num_kv_heads) if shared else 1
    d_head = config.hidden_size // heads
    # For each kv head its queries, its key and its value.
    slots = torch.arange((heads // kv_heads + 2) * kv_heads * d_head).view(kv_heads, -1, d_head)
    q, k, v = (tuple(part.flatten().tolist()) for part in (slots[:, :-2], slots[:, -2], slots[:, -1]))
    plan = _family("Falcon", Columns(("query_key_value",) * 3, (q, k, v)))
    return replace(
        plan,
        attn_norm="ln_attn" if two_norms else plan.attn_norm,
        mid_norm=plan.mid_norm if serial else None,
        alibi=Alibi(factor=d_head**-0.5, rounded_to=torch.bfloat16) if config.alibi else None,
        rotary=None if config.alibi else HALVES,
        replacement=through_attend,
        trusted="sdpa" if config.alibi else None,
        n_heads=heads,
        n_kv_heads=kv_heads,
    )


def _gpt2(config: Config) -> Architecture:
    if config.add_cross_attention:
        _refuse("add_cross_attention=True (cross-attention to another model's states)")
    return _family("GPT-2", Fused("c_attn", "qkv head d_head"), position_limit=config.n_positions)


def _gptj(config: Config) -> Architecture:
    d_head = config.hidden_size // config.num_attention_heads
    return _family(
        "GPT-J",
        GPTJAttention.layout,
        rotary=replace(PAIRS, share=(config.rotary_dim or d_head) / d_head, theta=10_000.0),
        replacement=GPTJAttention,
        position_limit=config.n_positions,
    )


def _codegen(config: Config) -> Architecture:
    d_head = config.n_embd // config.n_head
    return replace(
        _gptj(config), name="CodeGen", qkv=codegen_layout(config.n_head, d_head), replacement=CodeGenAttention
    )


def _gpt_neo(config: Config) -> Architecture:
    limit = config.max_position_embeddings
    return _family("GPT-Neo", GPTNeoAttention.layout, replacement=GPTNeoAttention, position_limit=limit)


def _gpt_neox(config: Config) -> Architecture:
    plan = _family("GPT-NeoX", Fused("query_key_value", "head qkv d_head"))
    return replace(
        plan,
        mid_norm=None if config.use_parallel_residual else plan.mid_norm,
        rotary=replace(HALVES, share=config.rope_parameters.get("partial_rotary_factor", 1.0)),
    )


def _opt(config: Config) -> Architecture:
    pre = config.do_layer_norm_before
    narrow = config.word_embed_proj_dim != config.hidden_size
    normed = pre and not config._remove_final_layer_norm
    no_norm = "there is no norm between its last block and its unembedding"
    return Architecture(
        name="OPT",
        blocks="decoder.layers",
        final_norm="decoder.final_layer_norm" if normed else None,
        head_refused="its stream is projected before the unembedding" if narrow else "" if normed else no_norm,
        attention="self_attn",
        qkv=Separate("q_proj", "k_proj", "v_proj"),
        out="self_attn.out_proj",
        norm="pre" if pre else "post",
        attn_norm="self_attn_layer_norm" if pre else None,
        mid_norm="final_layer_norm" if pre else "self_attn_layer_norm",
        post_norm=None if pre else "final_layer_norm",
        mlp_out="fc2",
        query_scale=(config.hidden_size // config.num_attention_heads) ** -0.5,
        position_limit=config.max_position_embeddings,
        embed_projection="decoder.project_in" if narrow else None,
    )


def _llama(config: Config, name: str = "Llama") -> Architecture:
    return _family("Llama", Separate("q_proj", "k_proj", "v_proj"), name=name, rotary=HALVES)


def _gemma2(config: Config) -> Architecture:
    if getattr(config, "use_bidirectional_attention", False):
        _refuse("use_bidirectional_attention=True")
    return replace(
        _llama(config, "Gemma 2"),
        attn_out="post_attention_layernorm",
        mid_norm="pre_feedforward_layernorm",
        mlp_out="post_feedforward_layernorm",
        norm_offset=1.0,
        logit_softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
        trusted="eager",  # sdpa would leave out the soft cap
    )


def _bert(config: Config, name: str = "BERT") -> Architecture:
    if getattr(config, "add_cross_attention", False):
        _refuse("add_cross_attention=True (cross-attention to another model's states)")
    return Architecture(
        name=name,
        blocks="encoder.layer",
        attention="attention.self",
        qkv=Separate("query", "key", "value"),
        out="attention.output.dense",
        mid_norm="attention.output.LayerNorm",
        mlp_out="output.dense",
        norm="post",
        post_norm="output.LayerNorm",
        embed_norm="embeddings.LayerNorm",
        head_refused="its head transforms the stream with its own layer before the unembedding",
        position_limit=config.max_position_embeddings,
        causal=bool(getattr(config, "is_decoder", False)),
    )


def _roberta(config: Config) -> Architecture:
    # Positions are counted from padding_idx + 1, so the table holds fewer tokens than it has rows.
    limit = config.max_position_embeddings - (config.pad_token_id or 0) - 1
    return replace(_bert(config, "RoBERTa"), position_limit=limit)


def _windows(config: Config) -> tuple[int, ...]:
    windows = config.attention_window
    return (windows,) * config.num_hidden_layers if isinstance(windows, int) else tuple(windows)


def _longformer(config: Config) -> Architecture:
    return replace(
        _roberta(config),
        name="Longformer",
        qkv=LongformerAttention.layout,
        gate=HalfOfRow(),
        windows=_windows(config),
        replacement=LongformerAttention,
        adapt=with_halves,
        causal=False,
    )


def _deberta_v2(config: Config, name: str = "DeBERTa-v2") -> Architecture:
    reason = why_not(config)
    if reason is not None:
        _refuse(reason)
    return replace(
        _bert(config, name),
        qkv=DisentangledAttention.layout,
        position_limit=config.max_position_embeddings if config.position_biased_input else None,
        causal=False,
        chained=getattr(config, "conv_kernel_size", 0) <= 0,
        relative="DeBERTa" if config.relative_attention else "",
        replacement=DisentangledAttention,
    )


def _deberta(config: Config) -> Architecture:
    return replace(
        _deberta_v2(config, "DeBERTa"),
        qkv=FirstDisentangledAttention.layout,
        chained=True,
        replacement=FirstDisentangledAttention,
    )


def _xlnet(config: Config) -> Architecture:
    if config.bi_data:
        _refuse("bi_data=True (half of its texts count distances backwards)")
    if config.attn_type != "bi":
        _refuse(f"attn_type={config.attn_type!r} (transformers does not run it on texts with padding)")
    return _family(
        "XLNet",
        XLNetCore.layout,
        norm="post",
        post_norm="ff.layer_norm",
        head_refused="there is no norm between its last block and its unembedding",
        batch_first=False,
        causal=False,
        relative="XLNet",
        replaced="rel_attn",
        replacement=XLNetAttention,
    )


def _t5(config: Config) -> tuple[Architecture, ...]:
    encoder = Architecture(
        name="T5",
        stack="encoder",
        blocks="encoder.block",
        final_norm="encoder.final_layer_norm",
        attention="layer.0.SelfAttention",
        qkv=Separate("q", "k", "v"),
        out="layer.0.SelfAttention.o",
        attn_norm="layer.0.layer_norm",
        mid_norm="layer.1.layer_norm",
        mlp_out="layer.1.DenseReluDense",
        head_refused="the norm after its stacks is not among the points, and a tied head scales it",
        causal=False,
        hands_on=True,
    )
    decoder = replace(
        encoder,
        stack="decoder",
        blocks="decoder.block",
        final_norm="decoder.final_layer_norm",
        mlp_out="layer.2.DenseReluDense",
        interposed="cross",
        causal=True,
    )
    cross = replace(
        encoder,
        stack="cross",
        blocks="decoder.block",
        final_norm=None,
        within="layer.1",
        attention="EncDecAttention",
        out="EncDecAttention.o",
        attn_norm="layer_norm",
        mid_norm=None,
        mlp_out=None,
        positioned=False,
    )
    return encoder, decoder, cross


def _like_bart(name: str, config: Config, limits: tuple[int, int]) -> tuple[Architecture, Architecture, Architecture]:
    """Encoder, decoder and cross-attention in post-norm blocks; `limits` are the positions of encoder and decoder."""
    encoder = _family(
        "MVP",
        Separate("q_proj", "k_proj", "v_proj"),
        name=name,
        stack="encoder",
        norm="post",
        post_norm="final_layer_norm",
        embed_norm="encoder.layernorm_embedding",
        embed_scale=config.d_model**0.5 if getattr(config, "scale_embedding", False) else 1.0,
        head_refused="there is no norm between its last block and its unembedding",
        query_scale=(config.d_model // config.encoder_attention_heads) ** -0.5,
        replacement=through_attend,
        position_limit=limits[0],
        n_heads=config.encoder_attention_heads,
        causal=False,
        hands_on=True,
    )
    decoder = replace(
        encoder,
        stack="decoder",
        blocks="decoder.layers",
        interposed="cross",
        interposed_norm="encoder_attn_layer_norm",
        embed_norm="decoder.layernorm_embedding",
        query_scale=(config.d_model // config.decoder_attention_heads) ** -0.5,
        position_limit=limits[1],
        n_heads=config.decoder_attention_heads,
        causal=True,
    )
    cross = replace(
        decoder,
        stack="cross",
        within="encoder_attn",
        attention="",
        out="out_proj",
        attn_out="out_proj",
        streams=False,
        norm="pre",
        mid_norm=None,
        mlp_out=None,
        post_norm=None,
        embed_norm=None,
        interposed="",
        interposed_norm=None,
        causal=False,
    )
    return encoder, decoder, cross


def _mvp(config: Config) -> Architecture | tuple[Architecture, ...]:
    if config.use_prompt:
        _refuse("use_prompt=True (keys and values that belong to no token)")
    limit = config.max_position_embeddings
    encoder, decoder, cross = _like_bart("MVP", config, (limit, limit))
    if not config.is_encoder_decoder:
        return replace(decoder, stack="", interposed="", interposed_norm=None, hands_on=False)
    return encoder, decoder, cross


def _led(config: Config) -> tuple[Architecture, ...]:
    limits = config.max_encoder_position_embeddings, config.max_decoder_position_embeddings
    encoder, decoder, cross = _like_bart("LED", config, limits)
    encoder = replace(
        encoder,
        attention="self_attn.longformer_self_attn",
        qkv=LongformerAttention.layout,
        out="self_attn.output",
        query_scale=1.0,
        gate=HalfOfRow(),
        windows=_windows(config),
        replacement=LongformerAttention,
        adapt=with_halves_in_encoder,
    )
    return encoder, decoder, cross


ARCHITECTURES: Final[Mapping[str, Callable[[Config], Architecture | tuple[Architecture, ...]]]] = {
    "bert": _bert,
    "bloom": _bloom,
    "codegen": _codegen,
    "deberta": _deberta,
    "deberta-v2": _deberta_v2,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "led": _led,
    "llama": _llama,
    "longformer": _longformer,
    "mistral": partial(_llama, name="Mistral"),
    "mpt": _mpt,
    "opt": _opt,
    "qwen2": partial(_llama, name="Qwen2"),
    "qwen3": lambda config: replace(_llama(config, "Qwen3"), qk_norm=("q_norm", "k_norm")),
    "mt5": _t5,
    "mvp": _mvp,
    "roberta": _roberta,
    "t5": _t5,
    "xlm-roberta": _roberta,
    "xlnet": _xlnet,
}
"""By transformers' `config.model_type`."""
