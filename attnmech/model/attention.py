"""The one place that takes the softmax: blocks of rows, with edits and observers on their way.

Every score, pattern and z that attnmech reports, edits or reduces comes from `attend`. Models reach it
through transformers' attention interface, or through a module of ours that stands in for theirs
(`attnmech.model.stand_ins`). The mask arrives as a rule (`MaskRule`) and is evaluated a block of rows at a time,
so that no [query key] mask need exist.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import UnsupportedModelError
from ..maths.scores import attention_of
from ..points import full_name
from .tap import Notes, Tap

IMPLEMENTATION: Final = "attnmech"
"""The name under which transformers finds `attend` (`config._attn_implementation`)."""

_BLOCK_BYTES: Final = 32 * 2**20
"""Rows of scores are taken in blocks of about this size, which stay in cache-friendly reach."""


@dataclass(frozen=True)
class MaskRule:
    """Which keys each query may see, as a rule over positions; evaluated for a block of rows."""

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    allows: Callable[..., Tensor]
    padding: Bool[Tensor, "batch key"] | None
    device: torch.device

    ndim = 0
    """Models that would look into a mask tensor (Falcon) find that this is none."""

    def to(self, *_: Any) -> "MaskRule":
        """Itself: a rule has no type to be cast to (MPT asks)."""
        return self

    def visible(self, rows: range) -> Bool[Tensor, "batch 1 row key"]:
        """True where the query of that row may look at the key."""
        row = torch.arange(rows.start, rows.stop, device=self.device) + self.query_offset
        key = torch.arange(self.keys, device=self.device) + self.key_offset
        sequence = torch.arange(self.batch, device=self.device)
        head = torch.zeros(1, dtype=torch.long, device=self.device)
        seen = self.allows(sequence[:, None, None, None], head[None, :, None, None], row[:, None], key[None, :])
        seen = torch.as_tensor(seen, device=self.device)
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, self.key_offset : self.key_offset + self.keys]
        return seen.expand(self.batch, 1, len(rows), self.keys)


def mask_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> MaskRule:
    """What transformers calls in place of building a mask; the arguments are transformers' own."""
    padding = None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
    return MaskRule(
        batch_size,
        q_length,
        kv_length,
        int(q_offset),
        int(kv_offset),
        mask_function,
        padding,
        torch.device(device),
    )


@dataclass(frozen=True)
class RowBlock:
    """What an observer sees of one layer: a block of rows, with all that made it.

    `q`, `visible`, `scores` and `pattern` are those of the block's rows; `k`, `v`, `position` and `mask` those
    of the layer. `scores` and `pattern` are what the model goes on with, after edits; hidden cells of `scores`
    hold the lowest finite number. `position` is the model's own position term, None where scores have none.
    """

    stack: str
    """The label of the stack, empty where the model has one."""
    layer: int
    rows: range
    q: Float[Tensor, "batch head row d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    position: Float[Tensor, "#batch #head #query key"] | None
    mask: MaskRule
    softcap: float | None
    sink: Float[Tensor, " head"] | None
    notes: Notes
    """Rotary tables and norm scales of this layer's queries and keys."""
    visible: Bool[Tensor, "batch 1 row key"]
    scores: Float[Tensor, "batch head row key"]
    pattern: Float[Tensor, "batch head row key"]


def attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    *,
    scale: float,
    position: Float[Tensor, "#batch #head #query key"] | None,
    mask: MaskRule,
    site: "Site",
    softcap: float | None = None,
    sink: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch query head d_head"]:
    """Attention of one layer, a block of rows at a time.

    score_ij = scale · q_i·k_j + position_ij, soft-capped to c·tanh(score/c) where the model does so, where the
    mask lets i see j, else the lowest finite number; pattern_i = softmax_j(score_ij), with a sink as one more
    logit in the normaliser; z_i = Σ_j pattern_ij v_j. Query heads share keys and values in groups of
    head / kv_head. A row that sees no key (padding on the left) comes out uniform, as in transformers'
    eager attention. The softmax is taken in float32 or, in a float64 model, in float64.
    """
    tap, layer = site.tap, site.layer
    q, k = (_visit_by_position(site, name, value) for name, value in (("q_rot", q), ("k_rot", k)))
    group = q.shape[1] // k.shape[1]
    keys, values = (repeat(x, "batch kv key d -> batch (kv group) key d", group=group) for x in (k, v))
    whole = any(tap.wants(site.point(name), layer) for name in ("scores", "pattern"))
    blocks = []
    for rows in _row_blocks(q, keys, whole):
        visible = mask.visible(rows)
        queries = q[:, :, rows.start : rows.stop]
        place = None if position is None else _rows_of(position, rows)
        scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
        if place is not None:
            scores = scores + place
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        scores = tap.visit(site.point("scores"), layer, scores, owned=True)
        pattern = attention_of(scores, sink)
        pattern = tap.visit(site.point("pattern"), layer, pattern, owned=True)
        if tap.under_way.observers:
            notes = tap.under_way.notes
            block = RowBlock(
                site.stack, layer, rows, queries, k, v, scale, position, mask, softcap, sink, notes,
                visible, scores, pattern,
            )  # fmt: skip
            for observe in tap.under_way.observers:
                observe(block, tap.under_way.values)
        blocks.append(torch.matmul(pattern, values))
    z = rearrange(torch.cat(blocks, dim=2), "batch head query d_head -> batch query head d_head")
    return tap.visit(site.point("z"), layer, z)


def _visit_by_position(site: "Site", name: str, value: Tensor) -> Tensor:
    if not site.tap.wants(site.point(name), site.layer):
        return value
    swapped = rearrange(value, "batch head position d_head -> batch position head d_head")
    visited = site.tap.visit(site.point(name), site.layer, swapped)
    return rearrange(visited, "batch position head d_head -> batch head position d_head")


def _rows_of(position: Tensor, rows: range) -> Tensor:
    return position if position.shape[2] == 1 else position[:, :, rows.start : rows.stop]


def _row_blocks(q: Tensor, keys: Tensor, whole: bool) -> Iterator[range]:
    batch, heads, queries, _ = q.shape
    row_bytes = batch * heads * keys.shape[2] * q.element_size()
    step = queries if whole else max(16, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, queries, step):
        yield range(start, min(queries, start + step))


@dataclass(frozen=True)
class Site:
    """Where in the model an attention module stands: which tap it reports to, and as which layer of which stack."""

    tap: Tap
    layer: int
    stack: str = ""

    def point(self, name: str) -> str:
        """The full name of a point of this stack: "pattern", or "cross.pattern" where there are several."""
        return full_name(self.stack, name)


def attention_of_site(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; the arguments are transformers' own."""
    changes = {name for name in _CHANGES_THE_SCORES if options.get(name) is not None}
    if changes:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(changes))}, which attnmech does "
            "not compute yet, so its scores would be wrong."
        )
    if dropout:
        raise UnsupportedModelError(f"{type(module).__name__} drops attention at random although it is in eval mode.")
    site: Site = module.attnmech_site  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    z = attend(
        query,
        key,
        value,
        scale=scale,
        position=position_bias,
        mask=attention_mask,
        site=site,
        softcap=softcap,
        sink=s_aux,
    )
    return z, None


_CHANGES_THE_SCORES: Final = ("head_mask", "attn_bias", "alibi")

AttentionInterface.register(IMPLEMENTATION, attention_of_site)
AttentionMaskInterface.register(IMPLEMENTATION, mask_rule)
