"""How is a model built? An `Architecture` says where its parts are and how its blocks combine them.

Everything else in attnmech reads these values and never asks which family a model is of.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn

from ..parts.gates import Gate, HalfOfRow, NormGate
from ..parts.position import Alibi, Rotary
from ..parts.weights import Expanded, Layout


@dataclass(frozen=True)
class Architecture:
    """Where a model keeps its parts, and how its blocks combine them.

    Read from the model at load; give one to `am.load` for a model whose structure cannot be read. The certificate
    tells whether it is true. Forms of rotation are in `attnmech.model.parts.position`.

    >>> from attnmech.model.parts.position import HALVES
    >>> from attnmech.architecture import Separate
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
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        default = {field.name: field.default for field in fields(self)}
        changed = (f"{name} {_said(value)}" for name, value in values.items() if value != default[name])
        return f"{self.name}: {'; '.join(changed)}"


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(getattr(value, "__name__", value))
