"""Defines what observers see of a pass: each block of rows in turn, and each layer when it is finished."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...batch import Batch
from ...maths.norms import FrozenNorm
from ...maths.relative import Relative
from ...maths.softmax import Attention, Top
from ...points import PointKey, full_name
from ..parts.mask import MaskRule


@dataclass(frozen=True)
class Notes:
    """Values of a layer, besides its points, from which terms of scores and values are computed."""

    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine tables, `[batch position d_rotary]`
    make_query_norm: Callable[[], FrozenNorm] | None = None  # makes `query_norm`, which few observers read
    make_key_norm: Callable[[], FrozenNorm] | None = None
    gate: Tensor | None = None  # the factor of the pattern-weighted sum of v, `[batch position head d_value]`
    ungated: Tensor | None = None  # the pattern-weighted sum of v before the gate, in a layer with a gate
    key_input: Tensor | None = None  # the input of keys and values, if another stack's stream (cross-attention)
    value_input: Tensor | None = None  # the input of values, if keys have another (`nn.MultiheadAttention`)
    further_keys: Tensor | None = None  # that are not tokens, and follow them, `[batch head key d_head]`
    further_values: Tensor | None = None
    latent: Tensor | None = None  # the latent from which keys and values are expanded, in a layer with latents
    query_latent: Tensor | None = None  # the latent from which queries are expanded; None if made from `attn_in`
    shared: Tensor | None = None
    """The output of the projection that makes the latent and the part of the keys that heads share."""
    edited_key: Tensor | None = None
    """The keys `[batch kv_head position d_head]` that scores use, if the keys of a layer with latents were edited."""
    before_mlp: Tensor | None = None  # the stream that the MLP adds to, in a post-norm decoder
    mlp_part: Tensor | None = None  # sum of other modules' outputs, if several form the MLP; added to the last one's
    attn_in: Tensor | None = None  # the point `attn_in`, noted only if an intervention scales a term of the scores

    @property
    def query_norm(self) -> FrozenNorm | None:
        """The norm of the queries, frozen at its scales in this pass.

        Its multiplier is `[batch position head d_head]`.
        """
        return None if self.make_query_norm is None else self.make_query_norm()

    @property
    def key_norm(self) -> FrozenNorm | None:
        return None if self.make_key_norm is None else self.make_key_norm()

    def joined(self, join: Callable[[str, Tensor], Tensor]) -> "Notes":
        """The notes for all tokens; `join` puts the rows `[batch position ...]` of earlier passes first."""
        names = ("latent", "query_latent", "shared", "attn_in")
        whole: dict[str, Any] = {
            name: join(name, value) for name in names if (value := getattr(self, name)) is not None
        }
        if self.rotary is not None:
            whole["rotary"] = tuple(join(name, table) for name, table in zip(("cos", "sin"), self.rotary, strict=True))
        for name, norm in (("make_query_norm", self.query_norm), ("make_key_norm", self.key_norm)):
            if norm is not None:
                shift = norm.shift if norm.shift is None or norm.shift.ndim < 4 else join(f"{name} shift", norm.shift)
                whole[name] = partial(replace, norm, multiplier=join(name, norm.multiplier), shift=shift)
        return replace(self, **whole)

    def inputs(self, attn_in: Float[Tensor, "batch position d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of W_Q, W_K and W_V (see `AttentionWeights`), in the precision of `attn_in`."""
        query = attn_in if self.query_latent is None else self.query_latent.to(attn_in)
        if self.latent is not None:
            latent = self.latent.to(attn_in)
            return query, torch.cat((latent, attn_in), dim=-1), latent
        key = attn_in if self.key_input is None else self.key_input.to(attn_in)
        return query, key, key if self.value_input is None else self.value_input.to(attn_in)


@dataclass(frozen=True)
class Points:
    """The points of one layer that a pass holds, by their own names: `block["resid_pre"]`."""

    stack: str  # the label of the stack; empty if the model has only one
    layer: int
    index: int  # the index of this layer among the watched layers
    batch: Batch
    values: Mapping[PointKey, Tensor]
    notes: Notes  # rotary tables and norm scales of this layer's queries and keys

    def __getitem__(self, name: str) -> Tensor:
        return self.values[full_name(self.stack, name), self.layer]

    def __contains__(self, name: str) -> bool:
        return (full_name(self.stack, name), self.layer) in self.values


@dataclass(frozen=True)
class LayerAttention:
    """The inputs of a layer's scores besides queries and keys."""

    stack: str
    layer: int
    scale: float
    position: Float[Tensor, "#batch #head #query key"] | None
    softcap: float | None
    sink: Float[Tensor, " head"] | None
    notes: Notes
    relative: Relative | None = None


@dataclass(frozen=True)
class RowBlock(Points):
    """A block of rows of one layer, as an observer sees it, with everything that it was computed from.

    `q`, `scores`, `pattern` and `visible` cover the block's rows and the keys up to the last that one of these rows can
    see; `k`, `v`, `position` and `mask` cover the layer. All are in float32 at least. Scores and pattern are after
    edits, as the model goes on to use them; hidden cells of `scores` hold the lowest finite number. Requested points
    are available by name once the layer has reached them: `block["resid_pre"]`. To keep part of a block's tensors, copy
    it.

    Where rows see few keys (a window), only these are computed: `attention` holds them, `keys` has their positions, and
    `scores` and `pattern` are filled up to all keys on first use.
    """

    rows: range
    q: Float[Tensor, "batch head row d_head"]
    k: Float[Tensor, "batch kv_head all_keys d_head"]
    v: Float[Tensor, "batch kv_head all_keys d_value"]
    scale: float
    position: Float[Tensor, "#batch #head #query all_keys"] | None
    """The model's own position term; None if its scores have none."""
    mask: MaskRule
    softcap: float | None
    sink: Float[Tensor, " head"] | None
    attention: Attention
    """The scores and the probabilities as the model computes them; only for the keys at `keys`, if that is not None."""
    relative: Relative | None = None
    """Tables of relative positions, with which queries and keys are multiplied (DeBERTa); None if there are none."""
    keys: Int[Tensor, " key"] | None = None
    """The positions of the keys of `attention`, in order; None if they are consecutive from 0."""

    @cached_property
    def scores(self) -> Float[Tensor, "batch head row key"]:
        """The scores, with the lowest finite number at hidden keys."""
        return self._filled(self.attention.scores, torch.finfo(self.attention.scores.dtype).min)

    @cached_property
    def pattern(self) -> Float[Tensor, "batch head row key"]:
        """The attention probabilities."""
        return self._filled(self.attention.pattern, 0.0)

    def _filled(self, values: Tensor, hidden: float) -> Tensor:
        if self.keys is None:
            return values
        width = int(self.keys[-1]) + 1
        return values.new_full((*values.shape[:-1], width), hidden).index_copy_(-1, self.keys, values)

    @cached_property
    def top(self) -> Top:
        """The two highest probabilities of each row, and the key of the highest."""
        top = self.attention.top
        return top if self.keys is None else replace(top, key=self.keys[top.key])

    @cached_property
    def visible(self) -> Bool[Tensor, "batch 1 row key"]:
        """True where the row can see the key."""
        width = self.attention.scores.shape[-1] if self.keys is None else int(self.keys[-1]) + 1
        return self.mask.visible(self.rows)[..., :width]

    @property
    def real(self) -> Bool[Tensor, "batch row"]:
        """True at rows of real tokens, False at padding."""
        return self.batch.queries(self.stack).mask[:, self.rows.start : self.rows.stop]


@dataclass(frozen=True)
class LayerEnd(Points):
    """A finished layer, as its observers see it: the requested points."""

    @property
    def real(self) -> Bool[Tensor, "batch position"]:
        """True at real tokens, False at padding."""
        return self.batch.queries(self.stack).mask


RowObserver: TypeAlias = Callable[[RowBlock], None]
"""Is called with every block of rows of the watched layers; it should reduce the block, and keep nothing large."""

LayerObserver: TypeAlias = Callable[[LayerEnd], None]  # is called with every watched layer when it is finished
