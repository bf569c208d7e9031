"""The attention of DeBERTa, DeBERTa-v2 and XLNet, with tables of relative positions.

In every layer, DeBERTa projects the rows of one embedding of relative positions, to keys that meet the tokens' queries
(c2p) and to queries that meet the tokens' keys (p2c). Scores are divided by √(d_head · n), n = 1 + the number of such
products.

XLNet: score_ij = ((q_i + u)·k_j + (q_i + v)·r_{i−j}) / √d_head, where u and v are one vector for each head (`r_w_bias`,
`r_r_bias`) and r is the projected sinusoid of the distance. Only the content stream is read; the query stream and
segments, which XLNet has in pretraining and for pairs of texts, are refused.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.relative import Relative, log_bucket
from ..parts.mask import rule_of
from ..parts.weights import Separate, bias_of, matrix_of
from .attend import Site, attend
from .replaced_attention import StandIn

_OF_Q, _OF_K, _OF_V = range(3)


class DisentangledAttention(StandIn):
    """DeBERTa-v2 and -v3: distances fall into logarithmic buckets; the projections of q and k often make the tables."""

    layout = Separate("query_proj", "key_proj", "value_proj")

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.heads = int(original.num_attention_heads)  # type: ignore[arg-type]
        d_head = int(original.attention_head_size)  # type: ignore[arg-type]
        self.kinds = tuple(original.pos_att_type)  # type: ignore[arg-type]
        self.scale = (d_head * self.products) ** -0.5
        self.relative = bool(original.relative_attention)
        self.span = self.span_of(original) if self.relative else 0
        self.shares = bool(getattr(original, "share_att_key", False))

    @property
    def products(self) -> int:
        """The number of products in a score, as the model counts them."""
        return 1 + len({"c2p", "p2c"}.intersection(self.kinds))

    @staticmethod
    def span_of(original: nn.Module) -> int:
        """Half the number of rows of the embedding of relative positions."""
        return int(original.pos_ebd_size)  # type: ignore[arg-type]

    @property
    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The projections of relative positions to keys and to queries; None for one that the model lacks."""
        return (
            self._of_kinds("key_proj", "query_proj")
            if self.shares
            else self._of_kinds("pos_key_proj", "pos_query_proj")
        )

    def _of_kinds(self, keys: str, queries: str) -> tuple[nn.Module | None, nn.Module | None]:
        c2p, p2c = (
            self.get_submodule(name) if self.relative and kind in self.kinds else None
            for kind, name in (("c2p", keys), ("p2c", queries))
        )
        return c2p, p2c

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """transformers' signature: returns the z of all heads, concatenated, and no weights."""
        if query_states is not None:
            raise UnsupportedModelError("DeBERTa's decoding steps (z_steps above 1) are not supported; leave it at 0.")
        q, k, v = self.project(hidden_states, self.heads, self.heads)
        relative = self._relative(relative_pos, rel_embeddings)
        return _attended(q, k, v, self.scale, attention_mask.bool(), self.attnmech_site, relative), None

    def _relative(self, positions: Tensor | None, embedded: Tensor | None) -> Relative | None:
        """The tables for the distances that occur in this pass."""
        if not self.relative or positions is None or embedded is None or self.projections == (None, None):
            return None
        # Positions are constant along diagonals, so the first row and the first column hold them all.
        every = positions.reshape(positions.shape[-2:])
        rows = (torch.cat((every[0, 1:].flip(0), every[:, 0])).long() + self.span).clamp(0, 2 * self.span - 1)
        first, last = int(rows.min()), int(rows.max())
        keys, queries = (
            None if projection is None else _table_of(projection, embedded[first : last + 1], self.heads)
            for projection in self.projections
        )
        here = torch.arange(len(every), device=rows.device)
        return Relative(keys, queries, rows - first, len(every) - 1, here, here)


class FirstDisentangledAttention(DisentangledAttention):
    """DeBERTa: one projection without biases makes q, k and v; separate biases of q and v are added."""

    layout = Separate("query", "key", "value")

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        fused = self.get_submodule("in_proj")
        q_bias, v_bias = (getattr(original, f"{name}_bias") for name in "qv")
        self.query = _Part(fused, _OF_Q, self.heads, q_bias)
        self.key = _Part(fused, _OF_K, self.heads, None)
        self.value = _Part(fused, _OF_V, self.heads, v_bias)

    @property
    def products(self) -> int:
        return 1 + len(self.kinds)

    @staticmethod
    def span_of(original: nn.Module) -> int:
        return int(original.max_relative_positions)  # type: ignore[arg-type]

    @property
    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        return self._of_kinds("pos_proj", "pos_q_proj")


class _Projection(nn.Module):
    """A projection that has its weight and its bias, as nn.Linear stores them, from other parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)  # type: ignore[arg-type]


class _Part(_Projection):
    """The columns of the fused projection that make q, k or v; for each head, these three parts are adjacent."""

    def __init__(self, fused: nn.Module, part: int, heads: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.fused, self.part, self.heads = fused, part, heads
        self.bias = bias

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        by_part = rearrange(
            matrix_of(self.fused), "d_in (head qkv d_head) -> qkv (head d_head) d_in", head=self.heads, qkv=3
        )
        return by_part[self.part]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None, site: Site, relative: Relative | None
) -> Float[Tensor, "batch position features"]:
    """z of all heads, concatenated; `seen` is True at the keys that a query sees."""
    mask = rule_of(seen, q.shape[2], k.shape[2], site.keys_batch)
    z = attend(q, k, v, scale=scale, position=None, mask=mask, site=site, relative=relative)
    return rearrange(z, "batch position head d_head -> batch position (head d_head)")


def _table_of(
    projection: nn.Module, embedded: Float[Tensor, "place d_model"], heads: int
) -> Float[Tensor, "head place d_head"]:
    """Embedded relative positions, projected for each head, without the projection's hooks, which are for tokens."""
    made, bias = embedded @ matrix_of(projection).to(embedded), bias_of(projection)
    made = made if bias is None else made + bias
    return rearrange(made, "place (head d_head) -> head place d_head", head=heads)


def row_of_distance(config: Any, distance: int) -> int:
    """The row of the embedding of relative positions that a distance uses, in closed form."""
    largest, buckets = _largest(config), _buckets(config)
    place = log_bucket(distance, buckets, largest) if buckets else distance
    span = buckets or largest
    return min(max(place + span, 0), 2 * span - 1)


def reach_of(config: Any) -> int:
    """The largest distance up to which every distance has a separate row."""
    return _buckets(config) // 2 or _largest(config)


def _largest(config: Any) -> int:
    largest: int = config.max_relative_positions
    return largest if largest > 0 else int(config.max_position_embeddings)


def _buckets(config: Any) -> int:
    return max(0, getattr(config, "position_buckets", 0))


def why_not(config: Any) -> str | None:
    """The unsupported option of a DeBERTa's config; None if all options are supported."""
    if getattr(config, "talking_head", False):
        return "talking_head=True (heads mix their scores with each other, so scores do not belong to single heads)"
    other = set(config.pos_att_type or ()) - {"c2p", "p2c"}
    if other:
        return f"{sorted(other)} in its pos_att_type (only c2p and p2c are)"
    if getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:
        return "an embedding_size other than hidden_size (the embeddings are projected before the first block)"
    return None


class XLNetAttention(nn.Module):
    """XLNet's attention module: positions come first, and it adds to the stream and norms the sum itself."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.core = XLNetCore(original)
        self.layer_norm: nn.Module = original.layer_norm

    def forward(
        self,
        h: Tensor,
        g: Tensor | None,
        attn_mask_h: Tensor | None,
        attn_mask_g: Tensor | None,
        r: Tensor,
        seg_mat: Tensor | None,
        mems: Tensor | None = None,
        target_mapping: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """transformers' signature: returns the stream after the norm, and no query stream."""
        unsupported = {"target_mapping": g, "token_type_ids": seg_mat, "mems": mems}
        named = [name for name, value in unsupported.items() if value is not None]
        if named:
            raise UnsupportedModelError(
                f"XLNet with {named[0]} is not supported; attnmech runs it on token ids and a mask only."
            )
        normed: Tensor = self.layer_norm(self.core(h.transpose(0, 1), attn_mask_h, r).transpose(0, 1) + h)
        return normed, None


class XLNetCore(nn.Module):
    """Computes `attn_raw` from `attn_in`, with texts first."""

    layout = Separate("query", "key", "value")
    attnmech_site: Site

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.heads, self.scale = int(original.n_head), float(original.scale)
        self.query = _ByHead(original.q, original.r_w_bias)
        self.key, self.value = _ByHead(original.k), _ByHead(original.v)
        self.out = _ByHead(original.o, inward=True)
        self.of_positions = _ByHead(original.r)
        self.position_bias = original.r_r_bias

    def forward(self, hidden_states: Tensor, hidden: Tensor | None, positions: Tensor) -> Tensor:
        """`attn_raw`; `hidden` is 1 where a key is, `[query key batch 1]`, `positions` [distance batch d_model]."""
        q, k, v = (
            rearrange(project(hidden_states), "batch position (head d) -> batch head position d", head=self.heads)
            for project in (self.query, self.key, self.value)
        )
        seen = None if hidden is None else rearrange(hidden[..., 0] <= 0, "query key batch -> batch 1 query key")
        relative = self._relative(positions[:, 0], q.shape[2])
        raw: Tensor = self.out(_attended(q, k, v, self.scale, seen, self.attnmech_site, relative))
        return raw

    def _relative(self, positions: Float[Tensor, "distance d_model"], length: int) -> Relative:
        """The tables of relative positions; the model lists distances from the largest down."""
        rows = length - torch.arange(1 - length, length, device=positions.device)
        made = self.of_positions(positions.to(self.of_positions.weight.dtype))
        table = rearrange(made, "place (head d_head) -> head place d_head", head=self.heads)
        bias = self.position_bias - rearrange(self.query.bias, "(head d_head) -> head d_head", head=self.heads)
        alone = (table @ bias[:, :, None])[..., 0]
        here = torch.arange(length, device=positions.device)
        return Relative(table, None, rows, length - 1, here, here, alone, by_input=True)


class _ByHead(_Projection):
    """A projection between the stream and the heads, whose matrix has an axis for heads: `[d_model head d_head]`."""

    def __init__(self, matrix: nn.Parameter, bias: nn.Parameter | None = None, *, inward: bool = False) -> None:
        super().__init__()
        self.matrix, self.by_head, self.inward = matrix, bias, inward

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """As nn.Linear stores it."""
        whole = self.matrix.flatten(1)
        return whole if self.inward else whole.T

    @property
    def bias(self) -> Float[Tensor, " d_out"] | None:
        return None if self.by_head is None else self.by_head.flatten()
