"""How do architectures differ? In where things are and how blocks are built: one `Architecture` value each.

The table has families whose attention code, or inputs, are their own, and some that everybody knows: one of their
models that is built otherwise fails its certificate. All others are read from the model (`structure.py`). Everything
else in attnmech reads these values and never asks which architecture it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, NoReturn, TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.norms import reciprocal_rms
from ..attention.disentangled import DisentangledAttention, FirstDisentangledAttention, why_not
from ..attention.led import LedDecoderAttention, with_halves_in_encoder
from ..attention.local_global import LongformerAttention, with_halves
from ..attention.replaced_attention import (
    BloomAttention,
    CodeGenAttention,
    FalconAttention,
    GPTJAttention,
    GPTNeoAttention,
    MptAttention,
    MvpAttention,
    codegen_layout,
)
from ..attention.two_stream import XLNetAttention, XLNetCore
from ..parts.position import HALVES, HALVES_ONCE, PAIRS, Rotary, alibi_slopes, alibi_slopes_mpt
from ..parts.weights import Expanded, Fused, Layout, Separate, select

Config: TypeAlias = Any
"""A transformers config; which entries it has depends on the family."""


KEY_STATES: Final = ("key_value_states", "encoder_hidden_states")
"""The arguments of transformers' attention modules that keys and values are made of, in cross-attention."""


@dataclass(frozen=True)
class Alibi:
    """How a family adds ALiBi, for the closed form that the certificate checks.

    position_hj = slope_h · factor · place_j, with place_j counted from the first real token, or from the end.
    """

    slopes: Callable[[int], Tensor] = alibi_slopes
    factor: float = 1.0
    from_end: bool = False
    rounded_to: torch.dtype = torch.float32
    """The precision in which the family computes slope · place, whatever the model's."""


@dataclass(frozen=True)
class Gate:
    """What the pattern-weighted sum of v is multiplied by: a function of columns of a projection of `attn_in`."""

    path: str
    """The projection, below the attention module."""
    columns: tuple[int, ...]
    """Its columns, one for each entry of z, head by head."""
    function: str
    """The name of the function in torch.nn.functional."""

    def __str__(self) -> str:
        return f"{self.function} of columns of {self.path}"

    def of(self, output: Float[Tensor, "*places features"], heads: int) -> Float[Tensor, "*places head d_value"]:
        """The gate, from the projection's output."""
        chosen: Tensor = getattr(nn.functional, self.function)(select(output, self.columns))
        return rearrange(chosen, "... (head d_value) -> ... head d_value", head=heads)


@dataclass(frozen=True)
class NormGate:
    """An RMSNorm of the pattern-weighted sum of v, all heads together (BitNet), as what it multiplies that sum by.

    g = (weight + offset) / √(mean_d y² + ε), y the sum of all heads: the gate of each head depends on every head.
    """

    path: str
    """The norm, below the attention module."""
    offset: float = 0.0
    """What it adds to its weight."""

    def __str__(self) -> str:
        return f"the norm {self.path}"

    def of(
        self, weight: Float[Tensor, " features"], epsilon: float, ungated: Float[Tensor, "*places head d_value"]
    ) -> Float[Tensor, "*places head d_value"]:
        """The gate, from the norm's weight and what it is given; in float32 at least, as these norms compute."""
        heads = ungated.shape[-2]
        y = rearrange(ungated, "... head d_value -> ... (head d_value)")
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        scale = (weight.to(y) + self.offset) * reciprocal_rms(y, epsilon)[..., None]
        return rearrange(scale, "... (head d_value) -> ... head d_value", head=heads)


@dataclass(frozen=True)
class HalfOfRow:
    """A gate that is 1 in the half of a head's values that a row reads and 0 in the other (`local_global.py`)."""

    def __str__(self) -> str:
        return "1 in the half that a row uses, of the local or the global projections"


@dataclass(frozen=True)
class Architecture:
    """Where a model keeps its parts, and how its blocks combine them.

    Read from the model at load; give one to `am.load` for a model whose structure cannot be read. The certificate
    tells whether it is true. Forms of rotation are in `attnmech.model.parts.position`.

    >>> plan = Architecture(
    ...     name="mine", blocks="layers", attention="attn", qkv=Separate("q", "k", "v"), out="attn.o",
    ...     attn_norm="norm_1", mid_norm="norm_2", mlp_out="mlp", final_norm="norm", rotary=HALVES,
    ... )
    >>> print(plan)
    mine: blocks layers; attention attn; qkv q, k, v; out attn.o; mid_norm norm_2; mlp_out mlp; attn_norm norm_1; \
final_norm norm; rotary rotate_halves

    Paths are dotted. `blocks`, `embed_norm`, `embed_projection` and `narrow_norm` start at the base model; `attention`,
    `out`, `attn_out`, `attn_norm`, `mid_norm`, `mlp_out` and `post_norm` at the block; those of `qkv`, `qk_norm` and
    `v_norm` at the attention module.
    """

    name: str
    blocks: str
    attention: str
    """The module that receives `attn_in`."""
    qkv: Layout | Expanded
    out: str
    """The projection whose output is `attn_raw`."""
    mid_norm: str | None
    """The norm whose input is `resid_mid`; None if attention and MLP are added in one step."""
    mlp_out: str | None
    """The module whose output the MLP adds to the stream; None if the stack's blocks have no MLP."""
    mlp_further: tuple[str, ...] = ()
    """Modules that end before `mlp_out` does, and whose outputs are added to its output (Granite's shared MLP)."""
    mixer: str = ""
    """A module beside attention that writes into the stream in the same step (Falcon-H1's Mamba)."""
    mixer_scale: float = 1.0
    """The factor by which its output is multiplied before it is added."""
    stack: str = ""
    """The label of the stack, in a model with several: "encoder", "decoder" or "cross"."""
    within: str = ""
    """The path within each module of `blocks` to this stack's block, if that is not the whole module."""
    hybrid: bool = False
    """Whether only some of the blocks have attention; the others are skipped."""
    streams: bool = True
    """Whether the blocks take and return a residual stream; if not, each is an attention alone."""
    no_stream: str = ""
    """Why they do not, in a family whose blocks combine attention and stream in a way of their own."""
    chained: bool = True
    """Whether each block is given what the one before returns."""
    batch_first: bool = True
    """Whether what blocks take and return is [batch position d_model], not [position batch d_model]."""
    hands_on: bool = False
    """Whether blocks pass on more than the stream (T5: the first computes the position bias for all)."""
    interposed: str = ""
    """The stack whose attn_out is added between attention and MLP."""
    interposed_norm: str | None = None
    """Post-norm only: the norm after that."""
    positioned: bool = True
    """Whether what the model passes as its position bias is one (in T5's cross-attention it is all zeros)."""
    n_heads: int = 0
    """0 if the config has it in the usual place; likewise the heads of keys and values."""
    n_kv_heads: int = 0
    attn_out: str = ""
    """The module whose output is added to the stream, if that is not `out`."""
    attn_scale: float = 1.0
    """The factor by which that is multiplied before it is added."""
    mlp_scale: float = 1.0
    """The factor of what the MLP returns."""
    norm: Literal["pre", "post"] = "pre"
    """Whether norms come before attention and MLP, or after the sums."""
    attn_norm: str | None = None
    """Pre-norm only: the norm whose output is `attn_in`."""
    post_norm: str | None = None
    """Post-norm only: the norm whose output is `resid_post`."""
    final_norm: str | None = None
    """The norm between the last block and the unembedding."""
    norm_offset: float = 0.0
    """What norms add to their weight before they multiply by it (Gemma: 1)."""
    logit_scale: float = 1.0
    """The factor of the logits."""
    logit_bias: str = ""
    """The buffer beside the head that is added to its logits (Marian), by its name in the model with its head."""
    logit_softcap: float | None = None
    """c of soft-capped logits, c · tanh(logit / c)."""
    head_refused: str = ""
    """Why logits are not the final norm's output times W_U; empty if they are."""
    embed_norm: str | None = None
    """The norm whose output enters the stream."""
    embed_projection: str | None = None
    """The matrix between a factorised embedding and the stream (OPT, ALBERT)."""
    narrow_norm: str | None = None
    """The norm whose output `embed_projection` reads (ALBERT, ELECTRA)."""
    embed_scale: float = 1.0
    """The factor of the token embedding's rows."""
    stream_scale: float = 1.0
    """The factor by which embeddings are multiplied as they enter the stream (Granite)."""
    alibi: Alibi | None = None
    relative: Literal["", "DeBERTa", "XLNet"] = ""
    """Whose tables of relative positions queries and keys are multiplied with; empty if there are none."""
    rotary: Rotary | None = None
    unrotated: tuple[int, ...] = ()
    """The layers of a rotary model that do not rotate."""
    qk_norm: tuple[str, str] | None = None
    """Norms of each head's queries and keys, which multiply by one number per token and dimension."""
    gate: Gate | NormGate | HalfOfRow | None = None
    v_norm: str = ""
    """A norm of each head's values, below the attention module; the point `v` is what it returns."""
    v_norm_axes: str = "batch position head d_head"
    norm_after_rotary: bool = False
    """Whether these norms come after the rotation."""
    qk_norm_axes: str = "batch position head d_head"
    """The axes of what these norms are given, as einops writes them."""
    query_scale: float = 1.0
    """The factor by which the model multiplies q before calling its attention."""
    key_scale: float = 1.0
    """The same for k (Falcon-H1)."""
    mask: str = ""
    """Of attention code of a user's own, without a call of `scaled_dot_product_attention`: the argument that is its
    mask."""
    replaced: str = ""
    """The module that `replacement` replaces, if that is not the attention."""
    replacement: Callable[[nn.Module], nn.Module] | None = None
    """Replaces an attention module that does not go through transformers' attention interface."""
    adapt: Callable[[nn.Module], None] | None = None
    """What else has to change in a base model so that the attention can be replaced."""
    windows: tuple[int, ...] = ()
    """How many tokens each layer's rows see around their own, half before and half after, if some are global."""
    reads: Literal["tokens", "pixels", "sound", "tensors"] = "tokens"
    """What a model is given; "tensors" for a module of the user's own."""
    position_limit: int | None = None
    """The number of positions; None if any number works."""
    causal: bool = True
    trusted: Literal["eager", "sdpa"] | None = None
    """Transformers' attention implementation that computes what was trained, if the other does not."""

    @property
    def expanded(self) -> Expanded | None:
        """How queries, keys and values are expanded from latents; None if they are columns of `attn_in` W + b."""
        return self.qkv if isinstance(self.qkv, Expanded) else None

    def __str__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        default = {each.name: each.default for each in fields(self)}
        said = (f"{name} {_said(value)}" for name, value in given.items() if value != default[name])
        return f"{self.name}: {'; '.join(said)}"


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(getattr(value, "__name__", value))


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedModelError(f"a model with {reason} is not supported.")


def _bloom(config: Config) -> Architecture:
    if config.apply_residual_connection_post_layernorm:
        _refuse("apply_residual_connection_post_layernorm=True (the stream itself is normalised in every block)")
    return Architecture(
        name="BLOOM",
        blocks="h",
        final_norm="ln_f",
        attention="self_attention",
        qkv=BloomAttention.layout,
        out="self_attention.dense",
        attn_norm="input_layernorm",
        mid_norm="post_attention_layernorm",
        mlp_out="mlp.dense_4h_to_h",
        embed_norm="word_embeddings_layernorm",
        alibi=Alibi(),
        replacement=BloomAttention,
    )


def _mpt(config: Config) -> Architecture:
    if config.attn_config.clip_qkv:
        _refuse("clip_qkv (clipped queries and keys are not a sum of terms)")
    return Architecture(
        name="MPT",
        blocks="blocks",
        final_norm="norm_f",
        attention="attn",
        qkv=MptAttention.layout,
        out="attn.out_proj",
        attn_norm="norm_1",
        mid_norm="norm_2",
        mlp_out="ffn.down_proj",
        alibi=Alibi(alibi_slopes_mpt, from_end=True),
        replacement=MptAttention,
        position_limit=config.max_seq_len,
    )


def _falcon(config: Config) -> Architecture:
    heads = int(config.num_attention_heads)
    shared = config.new_decoder_architecture or not config.multi_query
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    serial = not (config.parallel_attn or config.new_decoder_architecture)
    d_head = config.hidden_size // heads
    return Architecture(
        name="Falcon",
        blocks="h",
        final_norm="ln_f",
        attention="self_attention",
        qkv=FalconAttention.layout,
        out="self_attention.dense",
        attn_norm="ln_attn" if two_norms else "input_layernorm",
        mid_norm="post_attention_layernorm" if serial else None,
        mlp_out="mlp",
        alibi=Alibi(factor=d_head**-0.5, rounded_to=torch.bfloat16) if config.alibi else None,
        rotary=None if config.alibi else HALVES,
        replacement=FalconAttention,
        trusted="sdpa" if config.alibi else None,
        n_heads=heads,
        n_kv_heads=int(config.num_kv_heads) if shared else 1,
    )


def _gpt2(config: Config) -> Architecture:
    if config.add_cross_attention:
        _refuse("add_cross_attention=True (cross-attention to another model's states)")
    return Architecture(
        name="GPT-2",
        blocks="h",
        final_norm="ln_f",
        attention="attn",
        qkv=Fused("c_attn", "qkv head d_head"),
        out="attn.c_proj",
        attn_norm="ln_1",
        mid_norm="ln_2",
        mlp_out="mlp",
        position_limit=config.n_positions,
    )


def _gptj(config: Config) -> Architecture:
    d_head = config.hidden_size // config.num_attention_heads
    return Architecture(
        name="GPT-J",
        blocks="h",
        final_norm="ln_f",
        attention="attn",
        qkv=GPTJAttention.layout,
        out="attn.out_proj",
        attn_norm="ln_1",
        mid_norm=None,
        mlp_out="mlp",
        rotary=replace(PAIRS, share=(config.rotary_dim or d_head) / d_head, theta=10_000.0),
        replacement=GPTJAttention,
        position_limit=config.n_positions,
    )


def _codegen(config: Config) -> Architecture:
    d_head = config.n_embd // config.n_head
    return replace(
        _gptj(config),
        name="CodeGen",
        qkv=codegen_layout(config.n_head, d_head),
        replacement=CodeGenAttention,
    )


def _gpt_neo(config: Config) -> Architecture:
    return Architecture(
        name="GPT-Neo",
        blocks="h",
        final_norm="ln_f",
        attention="attn.attention",
        qkv=GPTNeoAttention.layout,
        out="attn.attention.out_proj",
        attn_norm="ln_1",
        mid_norm="ln_2",
        mlp_out="mlp",
        replacement=GPTNeoAttention,
        position_limit=config.max_position_embeddings,
    )


def _gpt_neox(config: Config) -> Architecture:
    return Architecture(
        name="GPT-NeoX",
        blocks="layers",
        final_norm="final_layer_norm",
        attention="attention",
        qkv=Fused("query_key_value", "head qkv d_head"),
        out="attention.dense",
        attn_norm="input_layernorm",
        mid_norm=None if config.use_parallel_residual else "post_attention_layernorm",
        mlp_out="mlp",
        rotary=replace(HALVES, share=config.rope_parameters.get("partial_rotary_factor", 1.0)),
    )


def _opt(config: Config) -> Architecture:
    pre = config.do_layer_norm_before
    narrow = config.word_embed_proj_dim != config.hidden_size
    normed = pre and not config._remove_final_layer_norm
    no_norm = "no norm stands between its last block and its unembedding"
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
    return Architecture(
        name=name,
        blocks="layers",
        final_norm="norm",
        attention="self_attn",
        qkv=Separate("q_proj", "k_proj", "v_proj"),
        out="self_attn.o_proj",
        attn_norm="input_layernorm",
        mid_norm="post_attention_layernorm",
        mlp_out="mlp",
        rotary=HALVES,
    )


def _mistral(config: Config) -> Architecture:
    return _llama(config, "Mistral")


def _qwen2(config: Config) -> Architecture:
    return _llama(config, "Qwen2")


def _qwen3(config: Config) -> Architecture:
    return replace(_llama(config, "Qwen3"), qk_norm=("q_norm", "k_norm"))


def _gpt_oss(config: Config) -> Architecture:
    # sdpa would ignore the sinks.
    return replace(_llama(config, "gpt-oss"), rotary=HALVES_ONCE, trusted="eager")


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


def _jamba(config: Config) -> Architecture:
    return replace(
        _llama(config, "Jamba"),
        hybrid=True,
        final_norm="final_layernorm",
        rotary=None,
        mid_norm="pre_ff_layernorm",
        mlp_out="feed_forward",
    )


def _bamba(config: Config) -> Architecture:
    return replace(
        _llama(config, "Bamba"),
        hybrid=True,
        final_norm="final_layernorm",
        rotary=replace(HALVES, share=config.rope_parameters.get("partial_rotary_factor", 1.0)),
        mid_norm="pre_ff_layernorm",
        mlp_out="feed_forward",
    )


def _lfm2(config: Config) -> Architecture:
    return replace(
        _llama(config, "LFM2"),
        hybrid=True,
        final_norm="embedding_norm",
        out="self_attn.out_proj",
        attn_norm="operator_norm",
        mid_norm="ffn_norm",
        mlp_out="feed_forward",
        qk_norm=("q_layernorm", "k_layernorm"),
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
    given = config.attention_window
    return (given,) * config.num_hidden_layers if isinstance(given, int) else tuple(given)


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
    return Architecture(
        name=name,
        blocks="encoder.layer",
        attention="attention.self",
        qkv=DisentangledAttention.layout,
        out="attention.output.dense",
        mid_norm="attention.output.LayerNorm",
        mlp_out="output.dense",
        norm="post",
        post_norm="output.LayerNorm",
        embed_norm="embeddings.LayerNorm",
        head_refused="its head transforms the stream with its own layer before the unembedding",
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
    return Architecture(
        name="XLNet",
        blocks="layer",
        attention="rel_attn.core",
        qkv=XLNetCore.layout,
        out="rel_attn.core.out",
        mid_norm="rel_attn.layer_norm",
        mlp_out="ff.layer_2",
        norm="post",
        post_norm="ff.layer_norm",
        head_refused="no norm stands between its last block and its unembedding",
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
        head_refused="the norm above its stacks is not among its points, and tied heads scale it",
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


def _like_bart(
    name: str, config: Config, attention: Callable[[nn.Module], nn.Module], limits: tuple[int, int]
) -> tuple[Architecture, Architecture, Architecture]:
    """Encoder, decoder and cross-attention in post-norm blocks; `limits` are the positions of encoder and decoder."""
    encoder = Architecture(
        name=name,
        stack="encoder",
        blocks="encoder.layers",
        attention="self_attn",
        qkv=Separate("q_proj", "k_proj", "v_proj"),
        out="self_attn.out_proj",
        norm="post",
        mid_norm="self_attn_layer_norm",
        mlp_out="fc2",
        post_norm="final_layer_norm",
        embed_norm="encoder.layernorm_embedding",
        embed_scale=config.d_model**0.5 if getattr(config, "scale_embedding", False) else 1.0,
        head_refused="no norm stands between its last block and its unembedding",
        replacement=attention,
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
        _refuse("use_prompt=True (keys and values that are no tokens')")
    limit = config.max_position_embeddings
    encoder, decoder, cross = _like_bart("MVP", config, MvpAttention, (limit, limit))
    if not config.is_encoder_decoder:
        return replace(decoder, stack="", interposed="", interposed_norm=None, hands_on=False)
    return encoder, decoder, cross


def _led(config: Config) -> tuple[Architecture, ...]:
    limits = config.max_encoder_position_embeddings, config.max_decoder_position_embeddings
    encoder, decoder, cross = _like_bart("LED", config, LedDecoderAttention, limits)
    encoder = replace(
        encoder,
        attention="self_attn.longformer_self_attn",
        qkv=LongformerAttention.layout,
        out="self_attn.output",
        gate=HalfOfRow(),
        windows=_windows(config),
        replacement=LongformerAttention,
        adapt=with_halves_in_encoder,
    )
    return encoder, decoder, cross


ARCHITECTURES: Final[Mapping[str, Callable[[Config], Architecture | tuple[Architecture, ...]]]] = {
    "bamba": _bamba,
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
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "jamba": _jamba,
    "led": _led,
    "lfm2": _lfm2,
    "llama": _llama,
    "longformer": _longformer,
    "mistral": _mistral,
    "mpt": _mpt,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mt5": _t5,
    "mvp": _mvp,
    "roberta": _roberta,
    "t5": _t5,
    "xlm-roberta": _roberta,
    "xlnet": _xlnet,
}
"""By transformers' `config.model_type`."""

_RECURRENT: Final = "a model without attention: its layers carry a state from token to token"
_SPARSE: Final = (
    "whose attention is sparse, or local and global with projections of its own; take a model with full attention"
)
_APPROXIMATED: Final = "its attention approximates the softmax ({}), so it has no pattern"
_SELECTED: Final = "its attention sees the keys that an indexer selects in each layer; take a model with full attention"
_IN_LISTS: Final = "its attentions, norms and MLPs are in separate lists, so no module is a block"

_WINDOWS: Final = (
    "it attends within windows of patches, shifted and merged from layer to layer, so that its positions are not those "
    "of one stream"
)

REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bigbird_pegasus", "reformer", "longt5"), _SPARSE),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _WINDOWS),
    "wavlm": "its position bias is gated by the query, in attention code of its own; take wav2vec2 or HuBERT",
    "vit_mae": (
        "it leaves out most patches at random in every pass; its encoder sees all of them in a ViTModel: "
        "ViTModel.from_pretrained(folder)"
    ),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    "nllb-moe": "its experts take a limited number of tokens from a batch, so a text's output depends on other texts",
    "pegasus_x": "its encoder attends to global tokens beside those of the text",
    "prophetnet": "its decoder attends in several streams, one for each of the next tokens",
    "t5gemma": "a norm stands between its cross-attention and the stream, and encoder and decoder embed separately",
    "t5gemma2": "its decoder attends to its own tokens and to the encoder's in one softmax (merged attention)",
    **dict.fromkeys(("axk2", "dots3_note_text", "hy_v4"), _SELECTED),
    **dict.fromkeys(("xlm", "flaubert"), _IN_LISTS),
    "convbert": "half of what its W_O reads comes from a convolution beside the attention",
    "cpmant": "it puts prompt tokens of its own before every text, so its positions are not the text's tokens",
    "diffllama": "its heads subtract one pattern from another (differential attention), so rows do not sum to 1",
    "doge": "its attention adds to the scores what it makes of its values, which is no term of the ledger",
    "fnet": "a model without attention: it mixes tokens by Fourier transforms",
    "funnel": "it pools positions between blocks, so that they are not tokens",
    "ibert": "its projections are quantised layers, which return a scaling factor, too",
    "mra": _APPROXIMATED.format("blocks at several resolutions"),
    "nystromformer": _APPROXIMATED.format("by landmarks"),
    "squeezebert": "its projections are grouped convolutions, not matrices",
    "yoso": _APPROXIMATED.format("by hashing"),
    "recurrent_gemma": (
        "whose recurrent layers read padding, so that what a text gives depends on the texts beside it; Gemma has "
        "attention in every layer"
    ),
}
"""Families that are not supported, each with the reason."""


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at a dotted path."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path; `UnsupportedModelError` if the model is not built like its family."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"expected {type(root).__name__} to hold a module at {path!r}, as its family does; it has none. "
            "The model has been rebuilt or wrapped: load it as its own class."
        ) from error


def first_tensor(output: Any) -> Tensor:
    """The tensor that a block or attention module returns, alone or first in a tuple."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(found, torch.Tensor)
    return found
