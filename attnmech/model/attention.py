"""The one place that computes the softmax: in blocks of rows, with edits and observers on the way.

Every score, pattern and z that attnmech reports, edits or reduces comes from `attend`. Models reach it
through transformers' attention interface, or through a module of ours that stands in for theirs
(`attnmech.model.replaced_attention`). The mask arrives as a rule (`MaskRule`) and is evaluated a block of rows at a
time, so that no [query key] mask need exist.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import InputError, UnsupportedModelError
from ..maths.compiled import compiles
from ..maths.compiled_rows import measured_softmax
from ..maths.received import Received, neighbours
from ..maths.relative import Relative
from ..maths.scores import ScoreParts
from ..maths.softmax import Attention, softmax_with_sink
from ..points import full_name
from ..results.mean_qk import MeanQK
from .applied import AppliedInLayer
from .in_force import InForce, Watch
from .mask import MaskRule, mask_rule, rule_of
from .observed import LayerAttention, RowBlock

IMPLEMENTATION: Final = "attnmech"
"""The name under which transformers finds `attend` (`config._attn_implementation`)."""

_BLOCK_BYTES: Final = 8 * 2**20
"""Rows are processed in blocks whose scores have roughly this size, so that they stay in the CPU's cache."""


def attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_value"],
    *,
    scale: float,
    position: Float[Tensor, "#batch #head #query key"] | None,
    mask: MaskRule,
    site: "Site",
    softcap: float | None = None,
    sink: Float[Tensor, " head"] | None = None,
    weights: Callable[[Tensor, int], None] | None = None,
    relative: Relative | None = None,
) -> Float[Tensor, "batch query head d_value"]:
    """Attention of one layer, block of rows by block of rows.

    score_ij = scale · (q_i·k_j + q_i·K_p + k_j·Q_p) + position_ij, with tables of `relative` positions where the model
    has them, soft-capped to c·tanh(score/c) where the model does so, where the
    mask lets i see j, else the lowest finite number; pattern_i = softmax_j(score_ij), with a sink as one more
    logit in the denominator; z_i = Σ_j pattern_ij v_j. Query heads share keys and values in groups of
    head / kv_head. A row that sees no key (padding on the left) comes out uniform, as in transformers'
    eager attention. From q and k on everything is computed in float32 or, in a float64 model, in float64, and z is
    rounded to the model's precision. Keys that no row of a block may see are left out of it, unless somebody asks for
    whole rows: those after the last visible one, and all of them where observers bear it (`RowBlock.keys`). `weights`
    is given each block of the pattern, after edits, and the number of keys. In a pass that begins after this attention
    (`Part.z`), nothing of it is computed.
    """
    in_force, layer = site.in_force, site.layer
    if (given := in_force.given_z(layer)) is not None:
        return _visit_z(site, given)
    in_force.hold_values(site.stack, layer, v)
    q, k = (_visit_by_position(site, name, value) for name, value in (("q_rot", q), ("k_rot", k)))
    dtype, wide = v.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide).contiguous(), v.to(wide).contiguous()
    position = None if position is None else position.to(wide)
    changes, batch = in_force.applied_in(site.stack, layer), in_force.under_way.batch
    queries_batch, keys_batch = batch.queries(site.stack), batch.keys(site.stack)
    of_layer = LayerAttention(site.stack, layer, scale, position, softcap, sink, in_force.under_way.notes, relative)
    added = None if relative is None else relative.added_to(k)
    ledgers = None if changes is None else _terms_to_scale(changes, site, of_layer, mask)
    other_values = None if changes is None else changes.change_of_values(v, q.shape[1], keys_batch)
    whole = any(in_force.wants(site.point(name), layer) for name in ("scores", "pattern"))
    whole = whole or (changes is not None and changes.whole_rows)
    watch = in_force.under_way.watch
    index, blocks = watch.layers.get((site.stack, layer)) if watch.rows else None, []
    free = changes is None and position is None and added is None and weights is None
    free = free and not whole and (index is None or watch.gathered)
    edited = in_force.wants(site.point("pattern"), layer) or (changes is not None and changes.edits_pattern)
    received = _receiving(watch, site, q, k, mask)
    for rows in _row_blocks(q, mask, whole, free):
        at = mask.gathered(rows) if free else None
        keys: slice | Tensor = slice(k.shape[2] if whole else mask.span(rows).stop) if at is None else at
        queries = q[:, :, rows.start : rows.stop]
        scores = _scores(queries, k[:, :, keys], scale, position, added, rows)
        if changes is not None and ledgers is not None:
            changes.on_scores(scores, ledgers, rows)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _masked_and_visited(scores, mask, rows, site) if whole else _hide(scores, mask, rows, at)
        removed = None if changes is None else changes.removed(scores, queries_batch, keys_batch, mask, rows)
        if removed is not None:
            scores = scores.masked_fill(removed, torch.finfo(scores.dtype).min)
        attention = _softmax(scores, sink, site, rows, at, mask, None if edited else received)
        if edited:
            attention = _edited(attention, changes, removed, mask, rows, site)
            if received is not None:
                received.add(attention.pattern, rows, _runs(at, attention.pattern, rows, mask))
        read = _weighted_values(attention.pattern, v[:, :, keys])
        read = read if other_values is None else read + attention.pattern @ other_values[:, :, keys]
        blocks.append(read.to(dtype).transpose(1, 2))
        if weights is not None:
            weights(attention.pattern, k.shape[2])
        if index is not None:
            block = RowBlock(
                site.stack, layer, index, rows, in_force.under_way.batch, queries, k, v, scale, position, mask, softcap,
                sink, in_force.under_way.notes, scores, attention, in_force.under_way.values, relative, at, received,
            )  # fmt: skip
            for observe in watch.rows:
                observe(block)
            del block
        del scores, attention
    return _visit_z(site, torch.cat(blocks, dim=1), keep=weights is None)


def _masked_and_visited(
    scores: Float[Tensor, "batch head row key"], mask: MaskRule, rows: range, site: "Site"
) -> Float[Tensor, "batch head row key"]:
    """Whole rows of scores, hidden keys included, after what acts on them."""
    hidden = scores.masked_fill(~mask.visible(rows), torch.finfo(scores.dtype).min)
    return site.in_force.visit(site.point("scores"), site.layer, hidden, owned=True)


def _hide(scores: Float[Tensor, "batch head row key"], mask: MaskRule, rows: range, at: Tensor | None) -> Tensor:
    """Puts the lowest finite number, in place, where the mask hides a key; `at` are the positions of gathered keys."""
    lowest = torch.finfo(scores.dtype).min
    if at is not None:
        scores.masked_fill_(~mask.visible_at(rows, at), lowest)
    else:
        span, hidden = mask.hidden(rows)
        scores[..., span.start :].masked_fill_(hidden, lowest)
    return scores


def _edited(
    attention: Attention,
    changes: AppliedInLayer | None,
    removed: Tensor | None,
    mask: MaskRule,
    rows: range,
    site: "Site",
) -> Attention:
    """The attention of a block of rows, after what acts on its pattern."""
    in_force, point = site.in_force, site.point("pattern")
    if changes is not None and changes.edits_pattern:
        batch = in_force.under_way.batch
        queries, keys = batch.queries(site.stack), batch.keys(site.stack)
        attention = Attention(changes.on_pattern(attention.pattern, removed, queries, keys, mask, rows), None)
    if in_force.wants(point, site.layer):
        visited = in_force.visit(point, site.layer, attention.pattern, owned=True)
        if in_force.edits(point, site.layer) and not torch.equal(visited, attention.pattern):
            attention = Attention(visited, None)
    return attention


def _visit_z(site: "Site", weighted: Tensor, *, keep: bool = False) -> Tensor:
    """z, kept for passes that begin after it; with a gate, it is made only where W_O reads it."""
    if site.gated:
        site.in_force.note(ungated=weighted)
        return weighted
    if keep:
        site.in_force.keep_z(site.layer, weighted)
    z = site.in_force.visit(site.point("z"), site.layer, weighted)
    site.in_force.hold_z(site.stack, site.layer, z)
    return z


def _receiving(watch: Watch, site: "Site", q: Tensor, k: Tensor, mask: MaskRule) -> Received | None:
    """What keys and distances receive of this layer's rows: nothing yet; None if nobody wants to know."""
    if watch.classes is None or (site.stack, site.layer) not in watch.layers:
        return None
    return Received.nothing(watch.classes, q.shape[1], k.shape[2], 0 if site.stack == "cross" else mask.queries)


def _runs(at: Tensor | None, block: Tensor, rows: range, mask: MaskRule) -> Int[Tensor, "run 3"]:
    """The runs of neighbours among the keys of a block of rows."""
    return mask.once(("runs", rows, block.shape[3]), lambda: neighbours(at, block.shape[3]))


def _softmax(
    scores: Tensor,
    sink: Tensor | None,
    site: "Site",
    rows: range,
    at: Tensor | None,
    mask: MaskRule,
    received: Received | None,
) -> Attention:
    """The softmax of a block of rows with keys at some positions, shown to the running certificate.

    Measured whether somebody observes it or not, so that no observer changes a bit; and the compiled loops are faster:
    what is below e^-87 of the highest is 0 there, where torch's subnormal numbers would slow products down.
    """
    found = None
    if compiles(scores):
        places = torch.arange(mask.queries, device=mask.device) if at is None else at
        into = None if received is None else received.receivers(rows, _runs(at, scores, rows, mask))
        texts = site.in_force.under_way.batch.keys(site.stack)
        # A module that takes tensors is tried on an example before there are texts.
        told = at is None and len(texts.mask) == len(scores)
        begins = mask.once("begins", lambda: texts.begins) if told else None
        pattern, at_sink, found = measured_softmax(scores, sink, rows, places, into, begins)
    else:
        pattern, at_sink = softmax_with_sink(scores, sink)
        if received is not None:
            received.add(pattern, rows, _runs(at, pattern, rows, mask))
    site.in_force.hold_rows(site.stack, site.layer, rows.start, pattern, at_sink)
    return Attention(pattern, scores, found)


def _terms_to_scale(
    changes: AppliedInLayer, site: "Site", of_layer: LayerAttention, mask: MaskRule
) -> dict[MeanQK | None, ScoreParts] | None:
    """The ledgers of a layer in which interventions scale terms, computed from `attn_in` and the weights."""
    if not changes.scales:
        return None
    in_force, layer = site.in_force, site.layer
    for name in (site.point(each) for each in ("q", "k", "q_rot", "k_rot")):
        if in_force.edits(name, layer):
            raise InputError(
                f"{changes.scales[0].intervention}: a hook at {name!r} {layer} changes its terms; remove that hook."
            )
        if in_force.under_way.gradients and in_force.under_way.keeps((name, layer)):
            raise InputError(
                f"{changes.scales[0].intervention}: its terms come from attn_in, so gradients at {name!r} {layer} "
                "would miss them; ask for those at attn_in."
            )
    return changes.ledgers(of_layer, mask, in_force.under_way.batch)


def _scores(
    q: Float[Tensor, "batch head row d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    position: Float[Tensor, "#batch #head #query all_keys"] | None,
    added: Callable[[Tensor, slice], Tensor] | None,
    rows: range,
) -> Float[Tensor, "batch head row key"]:
    """Scores of a block of rows before a soft cap; `added` makes the products with tables of relative positions."""
    keys = k.shape[2]
    place = None if position is None else _rows_of(position, rows)[..., :keys]
    scores = _scaled_products(q, k, scale, place)
    return scores if added is None else scores + scale * added(q, slice(rows.start, rows.stop))[..., :keys]


def _scaled_products(
    q: Float[Tensor, "batch head row d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    position: Float[Tensor, "#batch #head #row key"] | None,
) -> Float[Tensor, "batch head row key"]:
    """scale · q·k + position, with scale and a position that is the same in all rows inside the matrix product."""
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


def _weighted_values(
    pattern: Float[Tensor, "batch head row key"], v: Float[Tensor, "batch kv_head key d_value"]
) -> Float[Tensor, "batch head row d_value"]:
    """Σ_j pattern_ij v_j, with the heads that share keys and values in one matrix product."""
    batch, heads, rows, _ = pattern.shape
    shared = heads // v.shape[1]
    grouped = rearrange(pattern, "batch (kv shared) row key -> (batch kv) (shared row) key", shared=shared)
    return torch.bmm(grouped, v.flatten(0, 1)).view(batch, heads, rows, -1)


def _visit_by_position(site: "Site", name: str, value: Tensor) -> Tensor:
    if not site.in_force.wants(site.point(name), site.layer):
        return value
    swapped = rearrange(value, "batch head position d_head -> batch position head d_head")
    visited = site.in_force.visit(site.point(name), site.layer, swapped)
    return rearrange(visited, "batch position head d_head -> batch head position d_head")


def _rows_of(position: Tensor, rows: range) -> Tensor:
    return position if position.shape[2] == 1 else position[:, :, rows.start : rows.stop]


def _row_blocks(q: Tensor, mask: MaskRule, whole: bool, gathered: bool) -> Iterable[range]:
    batch, heads, queries, _ = q.shape
    cell_bytes = batch * heads * q.element_size()
    return [range(queries)] if whole else mask.row_blocks(_BLOCK_BYTES // max(1, cell_bytes), gathered=gathered)


@dataclass(frozen=True)
class Site:
    """The place of an attention module in the model: to whom it reports, and as which layer of which stack."""

    in_force: InForce
    layer: int
    stack: str = ""
    kv_heads: int = 0
    """How many key-value heads the projections make; 0 if nothing expands them before the attention."""
    gated: bool = False
    """Whether z is made only after the attention, by a gate."""

    def point(self, name: str) -> str:
        """The full name of a point of this stack: "pattern", or "cross.pattern" if there are several."""
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
    """The function that transformers calls instead of its own attention; the arguments are transformers'."""
    changes = {name for name in _CHANGES_THE_SCORES if options.get(name) is not None}
    if changes:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(changes))}, which attnmech does "
            "not compute yet, so its scores would be wrong."
        )
    if dropout:
        raise UnsupportedModelError(f"{type(module).__name__} drops attention at random although it is in eval mode.")
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
        mask=rule_of(attention_mask, query.shape[2], key.shape[2], site.in_force.under_way.batch.keys(site.stack)),
        site=site,
        softcap=softcap,
        sink=s_aux,
    )
    return z, None


def unexpanded(
    value: Float[Tensor, "batch head key d_head"], kv_heads: int
) -> Float[Tensor, "batch kv_head key d_head"]:
    """Keys or values as the projections made them, if the model has repeated each for its group of query heads.

    Left as they are if the heads of a group differ: the certificate then finds that they are not repeated.
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
