"""Defines `Architecture`, which says where a model's parts are and how its blocks combine them.

Everything else in attnmech reads these values and never asks to which family a model belongs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn

from ...basics.public import public
from ..parts.gates import Gate, HalfOfRow, NormGate
from ..parts.position import Alibi, Rotary
from ..parts.weights import Expanded, Layout


@public
@dataclass(frozen=True)
class Architecture:
    """The places of a model's parts, and the way its blocks combine them.

    `am.load` reads it from the model; pass one for a model whose structure cannot be read. The certificate shows
    whether it is right. `am.architecture` has the forms of rotation, such as `HALVES`.

    >>> from attnmech.architecture import HALVES, Separate
    >>> plan = Architecture(
    ...     name="mine", blocks="layers", attention="attn", qkv=Separate("q", "k", "v"), out="attn.o",
    ...     attn_norm="norm_1", mid_norm="norm_2", mlp_out="mlp", final_norm="norm", rotary=HALVES,
    ... )
    >>> print(plan)
    mine: blocks layers; attention attn; qkv q, k, v; out attn.o; mid_norm norm_2; mlp_out mlp; attn_norm norm_1; \
final_norm norm; rotary rotate_halves

    Paths are dotted. `blocks`, `embed_norm`, `embed_projection` and `narrow_norm` start at the base model; `attention`,
    `out`, `attn_out`, `attn_norm`, `mid_norm`, `mlp_out` and `post_norm` at the block; `qkv`, `qk_norm` and `v_norm` at
    the attention module.
    """

    name: str
    blocks: str
    attention: str
    """The module that receives `attn_in`."""
    qkv: Layout | Expanded
    out: str
    """The projection W_O, which returns `attn_raw`."""
    mid_norm: str | None
    """The norm that reads `resid_mid`; None if attention and MLP are added to the stream in one step."""
    mlp_out: str | None
    """The module that returns what the MLP adds to the stream; None if the stack's blocks have no MLP."""
    mlp_further: tuple[str, ...] = ()
    """Modules that run before `mlp_out` ends, and whose outputs are added to its output (Granite's shared MLP)."""
    mixer: str = ""
    """A module that writes into the stream in the same step as attention (Falcon-H1's Mamba)."""
    mixer_scale: float = 1.0
    """The factor that multiplies the mixer's output."""
    stack: str = ""
    """The label of the stack, in a model with several: "encoder", "decoder" or "cross"."""
    within: str = ""
    """The path within each module of `blocks` to this stack's block; empty for the whole module."""
    hybrid: bool = False
    """Whether only some of the blocks have attention; attnmech skips the others."""
    idle: tuple[int, ...] = ()
    """The blocks that do not run on text alone (those that read images in Mllama); they leave the stream as it is."""
    streams: bool = True
    """Whether the blocks take and return a residual stream; if not, only their attention is read."""
    no_stream: str = ""
    """Why the blocks do not, in a family that combines attention and stream in another way."""
    chained: bool = True
    """Whether each block reads the output of the previous block."""
    batch_first: bool = True
    """Whether blocks take and return [batch position d_model] instead of [position batch d_model]."""
    hands_on: bool = False
    """Whether blocks pass on more than the stream (T5: the first computes the position bias for all)."""
    interposed: str = ""
    """The stack whose attn_out is added between this stack's attention and its MLP."""
    interposed_norm: str | None = None
    """Post-norm only: the norm after that addition."""
    positioned: bool = True
    """Whether the tensor passed as a position bias carries one (in T5's cross-attention it is all zeros)."""
    n_heads: int = 0
    """0 if the config has the number in its usual place; likewise for `n_kv_heads`, the heads of keys and values."""
    n_kv_heads: int = 0
    attn_out: str = ""
    """The module whose output is added to the stream; empty if that is `out`."""
    attn_scale: float = 1.0
    """The factor that multiplies the output of attention."""
    mlp_scale: float = 1.0
    """The factor that multiplies the output of the MLP."""
    norm: Literal["pre", "post"] = "pre"
    """Whether norms come before attention and MLP ("pre"), or after their outputs are added to the stream ("post")."""
    attn_norm: str | None = None
    """Pre-norm only: the norm that returns `attn_in`."""
    post_norm: str | None = None
    """Post-norm only: the norm that returns `resid_post`."""
    final_norm: str | None = None
    """The norm between the last block and the unembedding."""
    norm_offset: float = 0.0
    """The number that norms add to their weight (Gemma: 1)."""
    logit_scale: float = 1.0
    """The factor that multiplies the logits."""
    logit_bias: str = ""
    """The name, in the model with its head, of the buffer that is added to the logits (Marian)."""
    logit_softcap: float | None = None
    """c of soft-capped logits, c · tanh(logit / c)."""
    head_refused: str = ""
    """Why the logits are not the final norm's output times W_U; empty if they are."""
    embed_norm: str | None = None
    """The norm at the start of the stream."""
    embed_projection: str | None = None
    """The matrix between a factorised embedding and the stream (OPT, ALBERT)."""
    narrow_norm: str | None = None
    """The norm before `embed_projection` (ALBERT, ELECTRA)."""
    embed_scale: float = 1.0
    """The factor that multiplies the rows of the token embedding."""
    stream_scale: float = 1.0
    """The factor that multiplies the embeddings as they enter the stream (Granite)."""
    alibi: Alibi | None = None
    relative: Literal["", "DeBERTa", "XLNet"] = ""
    """The family, if tables of relative positions multiply its queries and keys; else empty."""
    rotary: Rotary | None = None
    unrotated: tuple[int, ...] = ()
    """The layers of a rotary model whose queries and keys are not rotated."""
    qk_norm: tuple[str, str] | None = None
    """The norms of each head's queries and keys, which multiply by one number per token and dimension."""
    gate: Gate | NormGate | HalfOfRow | None = None
    v_norm: str = ""
    """The path, within the attention module, of the norm of each head's values; its output is the point `v`."""
    v_norm_axes: str = "batch position head d_head"
    norm_after_rotary: bool = False
    """Whether the norms of queries and keys come after the rotation."""
    qk_norm_axes: str = "batch position head d_head"
    """The axes of the inputs of these two norms, as einops writes them."""
    query_scale: float = 1.0
    """The factor by which the model multiplies q before it calls its attention."""
    key_scale: float = 1.0
    """The factor by which the model multiplies k before it calls its attention (Falcon-H1)."""
    mask: str = ""
    """The name of the mask argument, in a user's own attention that does not call `scaled_dot_product_attention`."""
    replaced: str = ""
    """The module that `replacement` replaces; empty if that is the attention."""
    replacement: Callable[[nn.Module], nn.Module] | None = None
    """Replaces an attention module that does not go through transformers' attention interface."""
    adapt: Callable[[nn.Module], None] | None = None
    """Makes the other changes to the base model that replacing its attention requires."""
    windows: tuple[int, ...] = ()
    """For each layer of a model with global tokens, how many tokens around its own a row sees, half on each side."""
    reads: Literal["tokens", "pixels", "sound", "tensors"] = "tokens"
    """What the model reads; "tensors" for a user's own module."""
    position_limit: int | None = None
    """The number of positions that the model has; None if it takes any number."""
    causal: bool = True
    trusted: Literal["eager", "sdpa"] | None = None
    """The attention implementation of transformers that computes what was trained, if only one does."""

    @property
    def expanded(self) -> Expanded | None:
        """How queries, keys and values are expanded from latents; None if they are columns of `attn_in` W + b."""
        return self.qkv if isinstance(self.qkv, Expanded) else None

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        default = {field.name: field.default for field in fields(self)}
        changed = (f"{name} {_said(value)}" for name, value in values.items() if value != default[name])
        return f"{self.name}: {'; '.join(changed)}"


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(getattr(value, "__name__", value))
