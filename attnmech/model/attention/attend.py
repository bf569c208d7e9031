"""Computes every softmax of attention, in blocks of rows; edits change the values, and observers see them.

Every score, pattern and z that attnmech reports, edits or reduces comes from `attend`. Models reach it through
transformers' attention interface, or through a module of ours that replaces theirs
(`attnmech.model.attention.replaced_attention`). The mask comes as a rule (`MaskRule`), which is evaluated for one block
of rows at a time, so that no [query key] mask need exist.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from ...batch import Batch
from ...errors import InputError, UnsupportedModelError
from ...maths.blocks import block_bytes
from ...maths.relative import Relative
from ...maths.scores import ScoreParts
from ...maths.softmax import Attention, left_for_sink, softmax_with_sink
from ...points import full_name
from ...results.mean_qk import MeanQK
from ..parts.mask import MaskRule, mask_rule, rule_of
from .in_force import InForce
from .observed import LayerAttention, RowBlock

IMPLEMENTATION: Final = "attnmech"  # the name under which transformers finds `attend` (`config._attn_implementation`)


def attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_value"],
    *,
    scale: float,
    mask: MaskRule,
    site: "Site",
    position: Float[Tensor, "#batch #head #query key"] | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " head"] | None = None,
    relative: Relative | None = None,
    weights: Callable[[Tensor, int], None] | None = None,
) -> Float[Tensor, "batch query head d_value"]:
    """Attention of one layer, block of rows by block of rows.

    Where the mask lets i see j, score_ij = scale · (q_i·k_j + q_i·K_p + k_j·Q_p) + position_ij; K and Q are tables of
    `relative` positions, if the model has them, and the score becomes c·tanh(score/c) if the model has a soft cap.
    Elsewhere the score is the lowest finite number. pattern_i = softmax_j(score_ij), with a sink as one more logit in
    the denominator; z_i = Σ_j pattern_ij v_j. Query heads share keys and values in groups of head / kv_head. A row that
    sees no key (padding on the left) is uniform, as in transformers' eager attention. Everything after q and k is
    computed in float32 (float64 in a float64 model), and z is then rounded to the model's precision.

    `weights` is called with each block of the pattern, after edits, and the number of keys.
    """
    balance = site.in_force.balance
    if balance is not None:
        balance.hold_values(site.stack, site.layer, v, rows=q.shape[2] if site.in_force.under_way.past else None)
    notes = site.in_force.under_way.notes
    terms = LayerAttention(site.stack, site.layer, scale, position, softcap, sink, notes, relative)
    layer = _Layer(q, k, v, terms, mask, site, weights)
    z = torch.cat([_attend_rows(layer, rows) for rows in layer.blocks()], dim=1)
    if site.gated:  # a gated z is made only where W_O reads it
        site.in_force.note(ungated=z)
        return z
    z = site.in_force.visit(site.point("z"), site.layer, z)
    if balance is not None:
        balance.hold_z(site.stack, site.layer, z)
    return z


def _attend_rows(layer: "_Layer", rows: range) -> Float[Tensor, "batch row head d_value"]:
    """z of a block of rows. Keys that no row of the block may see are left out, unless whole rows are requested."""
    keys = layer.keys(rows)
    site, changes = layer.site, layer.changes
    scores = layer.products(rows, keys)
    if changes is not None and layer.ledgers is not None:
        changes.on_scores(scores, layer.ledgers, layer.of_text(rows))
    if (cap := layer.terms.softcap) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = layer.masked(scores, rows, keys)
    removed = None
    if changes is not None:
        removed = changes.removed(scores, site.queries_batch, site.keys_batch, layer.of_text(rows))
    scores = scores if removed is None else scores.masked_fill(removed, torch.finfo(scores.dtype).min)
    pattern, at_sink = softmax_with_sink(scores, layer.terms.sink)
    if (balance := site.in_force.balance) is not None:
        balance.hold_rows(site.stack, site.layer, rows.start, pattern, at_sink)
    attention = layer.edited(Attention(scores, pattern, at_sink=at_sink), removed, rows)
    z = layer.weighted_values(attention.pattern, keys)
    layer.show(attention, rows, keys)
    return z


class _Layer:
    """One layer's attention in one pass; queries, keys and values are in float32 at least, after their hooks."""

    def __init__(
        self,
        q: Float[Tensor, "batch head query d_head"],
        k: Float[Tensor, "batch kv_head key d_head"],
        v: Float[Tensor, "batch kv_head key d_value"],
        terms: LayerAttention,
        mask: MaskRule,
        site: "Site",
        weights: Callable[[Tensor, int], None] | None,
    ) -> None:
        q, k = (_visit_by_position(site, name, value) for name, value in (("q_rot", q), ("k_rot", k)))
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = q.to(wide), k.to(wide).contiguous(), v.to(wide).contiguous()
        self.terms = terms if terms.position is None else replace(terms, position=terms.position.to(wide))
        self.mask, self.site, self.weights = mask, site, weights
        self.changes = site.in_force.applied_in(site.stack, site.layer)
        self.added = None if terms.relative is None else terms.relative.added_to(self.k)
        """Computes what tables of relative positions add to q·k, for some rows and keys."""
        self.precision = v.dtype  # the precision of z in the model

    def blocks(self) -> Iterable[range]:
        """The rows in blocks; all rows in one block if whole rows are requested."""
        batch, heads, queries, _ = self.q.shape
        if self.whole:
            return [range(queries)]
        cells = block_bytes(self.q.device) // max(1, batch * heads * self.q.element_size())
        return self.mask.row_blocks(cells, gathered=self.gathers)

    def of_text(self, rows: range) -> range:
        past = self.site.in_force.under_way.past
        return range(rows.start + past, rows.stop + past)

    @cached_property
    def whole(self) -> bool:
        asked = any(self.site.wants(name) for name in ("scores", "pattern"))
        return asked or (self.changes is not None and self.changes.whole_rows)

    @cached_property
    def gathers(self) -> bool:
        """Whether the scores depend only on queries, keys and the mask, so that keys may be left out."""
        terms = self.changes is None and self.terms.position is None and self.added is None
        return terms and self.weights is None and not self.whole

    @cached_property
    def ledgers(self) -> dict[MeanQK | None, ScoreParts] | None:
        """The terms of the scores, computed from `attn_in` and the weights, if interventions scale any of them."""
        changes, in_force, layer = self.changes, self.site.in_force, self.site.layer
        if changes is None or not changes.scales:
            return None
        for name in map(self.site.point, ("q", "k", "q_rot", "k_rot")):
            if in_force.edits(name, layer):
                raise InputError(
                    f"{changes.scales[0]}: a hook at {name!r} {layer} changes the terms of the scores; remove that "
                    "hook."
                )
            if in_force.under_way.gradients and in_force.under_way.keeps((name, layer)):
                raise InputError(
                    f"{changes.scales[0]}: the terms of the scores are computed from attn_in, so gradients at "
                    f"{name!r} {layer} would miss them; ask for gradients at attn_in."
                )
        now, visible = in_force.under_way, self.mask.visible(range(self.mask.queries))
        terms = replace(self.terms, notes=in_force.whole_notes(self.site.stack, layer))
        return changes.ledgers(terms, pad(visible, (0, 0, now.past, 0)), now.batch)

    @cached_property
    def change_of_values(self) -> Float[Tensor, "batch head key d_value"] | None:
        if self.changes is None:
            return None
        return self.changes.change_of_values(self.v, self.q.shape[1], self.site.keys_batch)

    def keys(self, rows: range) -> slice | Int[Tensor, " key"]:
        """The keys computed for a block of rows: all up to the last visible one, or only the visible ones if few."""
        if self.gathers and (at := self.mask.gathered(rows)) is not None:
            return at
        return slice(self.k.shape[2] if self.whole else self.mask.span(rows).stop)

    def products(self, rows: range, keys: slice | Tensor) -> Float[Tensor, "batch head row key"]:
        """scale · (q·k + the products with relative positions) + position."""
        q, k, position = self.q[:, :, rows.start : rows.stop], self.k[:, :, keys], self.terms.position
        if position is not None:
            position = position[..., : k.shape[2]]
            position = position if position.shape[2] == 1 else position[:, :, rows.start : rows.stop]
        scores = _scaled_products(q, k, self.terms.scale, position)
        if self.added is None:
            return scores
        return scores + self.terms.scale * self.added(q, slice(rows.start, rows.stop))[..., : k.shape[2]]

    def masked(self, scores: Tensor, rows: range, keys: slice | Tensor) -> Tensor:
        """The scores, with the lowest finite number at hidden keys; whole rows also pass through the point `scores`."""
        lowest = torch.finfo(scores.dtype).min
        if self.whole:
            return self.site.visit("scores", scores.masked_fill(~self.mask.visible(rows), lowest))
        if isinstance(keys, Tensor):
            return scores.masked_fill_(~self.mask.visible_at(rows, keys), lowest)
        span, hidden = self.mask.hidden(rows)
        scores[..., span.start :].masked_fill_(hidden, lowest)
        return scores

    def edited(self, attention: Attention, removed: Tensor | None, rows: range) -> Attention:
        site, pattern, at_sink = self.site, attention.pattern, attention.at_sink
        if self.changes is not None and self.changes.edits_pattern:
            pattern, at_sink = self.changes.on_pattern(
                attention, removed, site.queries_batch, site.keys_batch, self.mask.visible(rows), self.of_text(rows)
            )
        edited = pattern is not attention.pattern
        if site.wants("pattern"):
            visited = site.visit("pattern", pattern)
            # A hook that changes no number may still change gradients, by `detach`.
            hooked = not (visited is pattern or torch.equal(visited, pattern))
            edited, pattern = edited or hooked, visited
            if hooked and at_sink is not None:
                at_sink = left_for_sink(pattern)
        return attention if pattern is attention.pattern else Attention(attention.scores, pattern, edited, at_sink)

    def weighted_values(self, pattern: Tensor, keys: slice | Tensor) -> Float[Tensor, "batch row head d_value"]:
        """Σ_j pattern_ij v_j, in the model's precision."""
        batch, heads, rows, _ = pattern.shape
        v, change = self.v[:, :, keys], self.change_of_values
        # The heads that share keys and values are in one matrix product.
        shared = heads // v.shape[1]
        grouped = rearrange(pattern, "batch (kv shared) row key -> (batch kv) (shared row) key", shared=shared)
        z = torch.bmm(grouped, v.flatten(0, 1)).view(batch, heads, rows, -1)
        z = z if change is None else z + pattern @ change[:, :, keys]
        return z.to(self.precision).transpose(1, 2)

    def show(self, attention: Attention, rows: range, keys: slice | Tensor) -> None:
        if self.weights is not None:
            self.weights(attention.pattern, self.k.shape[2])
        now = self.site.in_force.under_way
        index = now.watch.layers.get((self.site.stack, self.site.layer))
        if index is None or not now.watch.rows:
            return
        block = RowBlock(
            **vars(self.terms), index=index, rows=rows, batch=now.batch, q=self.q[:, :, rows.start : rows.stop],
            k=self.k, v=self.v, mask=self.mask, attention=attention, values=now.values,
            keys=keys if isinstance(keys, Tensor) else None,
        )  # fmt: skip
        for observe in now.watch.rows:
            observe(block)


def _scaled_products(
    q: Float[Tensor, "batch head row d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    position: Float[Tensor, "#batch #head #row key"] | None,
) -> Float[Tensor, "batch head row key"]:
    """scale · q·k + position; scale, and a position that is the same in all rows, are part of the matrix product."""
    batch, heads, rows, _ = q.shape
    shared = heads // k.shape[1]
    products = rearrange(q, "batch (kv shared) row d_head -> (batch kv) (shared row) d_head", shared=shared)
    keys = rearrange(k, "batch kv key d_head -> (batch kv) d_head key")
    if position is not None and position.shape[2] == 1 and shared == 1 and position.dtype == q.dtype:
        start, position = position.expand(batch, heads, 1, -1).flatten(0, 1), None
        scores = torch.baddbmm(start, products, keys, alpha=scale)
    else:
        scores = torch.baddbmm(q.new_zeros(1, 1, 1), products, keys, beta=0, alpha=scale)
    scores = scores.view(batch, heads, rows, -1)
    return scores if position is None else scores + position


def _visit_by_position(site: "Site", name: str, value: Tensor) -> Tensor:
    if not site.wants(name):
        return value
    swapped = rearrange(value, "batch head position d_head -> batch position head d_head")
    visited = site.in_force.visit(site.point(name), site.layer, swapped)
    return rearrange(visited, "batch position head d_head -> batch head position d_head")


@dataclass(frozen=True)
class Site:
    """The place of an attention module in the model (layer and stack), and the `InForce` to which it reports."""

    in_force: InForce
    layer: int
    stack: str = ""
    kv_heads: int = 0  # the key-value heads of the projections; 0 if nothing expands them before the attention
    gated: bool = False  # whether a gate makes z only after the attention

    def point(self, name: str) -> str:
        return full_name(self.stack, name)

    def wants(self, name: str) -> bool:
        return self.in_force.wants(self.point(name), self.layer)

    def visit(self, name: str, value: Tensor) -> Tensor:
        """Passes a value through a point of this layer; nothing else may change the value in place."""
        return self.in_force.visit(self.point(name), self.layer, value, owned=True)

    @property
    def queries_batch(self) -> Batch:
        return self.in_force.under_way.batch.queries(self.stack)

    @property
    def keys_batch(self) -> Batch:
        return self.in_force.under_way.batch.keys(self.stack)


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
    """The function that transformers calls instead of its own attention; the arguments are transformers'."""
    changes = {name for name in _CHANGES_THE_SCORES if options.get(name) is not None}
    if changes:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(changes))}, which attnmech does "
            "not compute yet, so its scores would be wrong."
        )
    if dropout:
        raise UnsupportedModelError(f"{type(module).__name__} applies attention dropout although it is in eval mode.")
    site: Site = module.attnmech_site  # type: ignore[assignment]
    edited = site.in_force.under_way.notes.edited_key
    key = key if edited is None else edited
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if isinstance(attention_mask, MaskRule) and attention_mask.bias is not None:
        position_bias = attention_mask.bias if position_bias is None else position_bias + attention_mask.bias
    z = attend(
        query,
        unexpanded(key, site.kv_heads),
        unexpanded(value, site.kv_heads),
        scale=scale,
        position=position_bias,
        mask=rule_of(attention_mask, query.shape[2], key.shape[2], site.keys_batch),
        site=site,
        softcap=softcap,
        sink=s_aux,
    )
    return z, None


def unexpanded(
    value: Float[Tensor, "batch head key d_head"], kv_heads: int
) -> Float[Tensor, "batch kv_head key d_head"]:
    """Keys or values as the projections made them, undoing the model's repetition of each head for its group of
    queries.

    If the heads of a group differ, they are returned unchanged, and the certificate reports that they are not repeated.
    """
    heads = value.shape[1]
    if not 0 < kv_heads < heads or heads % kv_heads:
        return value
    groups = rearrange(value, "batch (kv group) key d_head -> batch kv group key d_head", kv=kv_heads)
    first = groups[:, :, :1]
    return first[:, :, 0] if torch.equal(first.expand_as(groups), groups) else value


_CHANGES_THE_SCORES: Final = ("head_mask", "attn_bias", "alibi")

AttentionInterface.register(IMPLEMENTATION, attention_of_site)
AttentionMaskInterface.register(IMPLEMENTATION, mask_rule)
