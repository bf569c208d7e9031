"""Computes the score ledger of a layer from its weights and its rotation, and checks it against the scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ...batch import Batch
from ...errors import ExactnessError
from ...maths.norms import FrozenNorm
from ...maths.precision import computed_in, least_rounding, product_rounding, steps_rounding
from ...maths.scores import (
    Rounded,
    ScoreParts,
    by_position,
    of_part,
    product_error,
    relative_rounding,
    score_parts,
    score_rounding,
)
from ...results.mean_qk import MeanQK
from ..attention.observed import LayerAttention, Notes, RowBlock
from ..parts.position import Rotation
from .centring import Centre, centred
from .stack import Stack


def ledger_of_block(
    stacks: Mapping[str, Stack],
    block: RowBlock | LayerAttention,
    attn_in: Float[Tensor, "batch position d_model"],
    visible: Bool[Tensor, "batch 1 query key"],
    *,
    fold_norm: bool = False,
) -> ScoreParts:
    """The score ledger of one layer, from its input, its weights and the model's own position tensors.

    With `fold_norm`, the shift β of the norm that made `attn_in` counts as part of the bias. In half precision the
    parts are computed in float32.
    """
    stack = stacks[block.stack]
    plan, weights = stack.architecture, stack.weights(block.layer)
    wide = torch.promote_types(attn_in.dtype, torch.float32)

    def widen(value: Tensor | None) -> Tensor | None:
        # Always a copy: a result must not change if the model is trained further.
        return None if value is None else value.detach().to(wide, copy=True)

    query_input, key_input, _ = block.notes.inputs(attn_in.to(wide))
    rotation = stack.rotation(block.layer, block.notes)
    tokens = key_input.shape[1]
    position = None if block.position is None or not plan.positioned else block.position.to(wide)
    parts = score_parts(
        query_input,
        weights.W_Q.detach().to(wide),
        widen(weights.b_Q),
        weights.W_K.detach().to(wide),
        widen(weights.b_K),
        scale=block.scale * plan.query_scale * plan.key_scale,
        position=None if position is None else position[..., :tokens],
        visible=visible[..., :tokens],
        rotate=rotation,
        key_x=None if key_input is query_input else key_input,
        query_norm=_by_head(block.notes.query_norm, wide),
        key_norm=_by_head(block.notes.key_norm, wide),
        norm_last=plan.norm_after_rotary,
        softcap=block.softcap,
        sink=widen(block.sink),
        shift=widen(stack.input_shift(block.layer)) if fold_norm else None,
    )
    if block.relative is not None:
        parts = replace(parts, relative=block.relative.to(wide))
    if block.notes.further_keys is not None:
        parts = parts.followed_by(block.notes.further_keys.to(wide), position, visible)
    return parts if rotation is None else replace(parts, wavelengths=rotation.wavelengths(stack.d_head))


def made_of_parts(
    stack: Stack, layer: int, notes: Notes, parts: Float[Tensor, "source batch position d_model"]
) -> tuple[Float[Tensor, "source batch head position d_head"], Float[Tensor, "source batch head position d_head"]]:
    """The part of a layer's queries and keys, as they enter the score, that comes from each part of its `attn_in`."""
    weights, rotation = stack.weights(layer), stack.rotation(layer, notes)
    wide = torch.promote_types(parts.dtype, torch.float32)
    query, key = (
        of_part(
            parts.to(wide),
            W.detach().to(wide),
            rotate=rotation,
            norm=_by_head(norm, wide),
            norm_last=stack.architecture.norm_after_rotary,
        )
        for W, norm in ((weights.W_Q, notes.query_norm), (weights.W_K, notes.key_norm))
    )
    group = stack.n_heads // stack.n_kv_heads
    return query, repeat(key, "source batch kv ... -> source batch (kv group) ...", group=group)


def ledger_split_at(
    stacks: Mapping[str, Stack],
    block: LayerAttention,
    attn_in: Float[Tensor, "batch position d_model"],
    visible: Bool[Tensor, "batch 1 query key"],
    batch: Batch,
    means: MeanQK | None,
) -> ScoreParts:
    """The score ledger of one layer, split at the model's own biases or at fixed means.

    A text that is part of the means is not taken out of them: its later tokens would then affect its earlier ones.
    """
    parts = ledger_of_block(stacks, block, attn_in, visible)
    return parts if means is None else centred(parts, stacks[block.stack], block, batch, means, own_out=False)


@dataclass(frozen=True)
class Cells:
    """Some cells (query, key) of some heads of a layer; the queries are the same in every text and head."""

    heads: tuple[int, ...]
    query_at: Int[Tensor, " cell"]
    key_at: Int[Tensor, "batch head cell"]  # the keys of the cells; −1 where the text has no such cell

    def places(self, length: int) -> Bool[Tensor, "batch position"]:
        """The positions, among `length`, of the queries and keys of the cells that a text has."""
        there = torch.zeros(len(self.key_at), length, dtype=torch.bool, device=self.key_at.device)
        text, head, cell = (self.key_at >= 0).nonzero(as_tuple=True)
        there[text, self.key_at[text, head, cell]] = True
        there[text, self.query_at[cell]] = True
        return there

    def of_queries(self, value: Float[Tensor, "batch all_heads query *rest"]) -> Float[Tensor, "batch head cell *rest"]:
        """Values by query, looked up at the cells."""
        return value[:, list(self.heads)][:, :, self.query_at]

    def of_keys(self, value: Float[Tensor, "batch all_heads key *rest"]) -> Float[Tensor, "batch head cell *rest"]:
        """Values by key, looked up at the cells; arbitrary at cells that a text does not have."""
        chosen, place = value[:, list(self.heads)], self.key_at.clamp(min=0)
        for size in chosen.shape[3:]:
            place = place[..., None].expand(*place.shape, size)
        return chosen.gather(2, place)


class ScoreAudit:
    """Compares the score ledger of one layer with the scores that the model used, block by block.

    The tolerance of each cell is the rounding of the terms summed in that cell (`maths.scores.score_rounding`), so
    large scores of another head or row never excuse an error.
    """

    def __init__(
        self,
        stacks: Mapping[str, Stack],
        block: RowBlock,
        attn_in: Float[Tensor, "batch position d_model"],
        visible: Bool[Tensor, "batch 1 query key"],
        *,
        fold_norm: bool = False,
        centre: Centre | None = None,
    ) -> None:
        self.parts = ledger_of_block(stacks, block, attn_in, visible, fold_norm=fold_norm)
        if centre is not None:
            self.parts = centred(self.parts, stacks[block.stack], block, block.batch, centre)
        self._stack, self._block, self._dtype = stacks[block.stack], block, attn_in.dtype
        self._rotated = rotated_in(block.k, stacks[block.stack].rotation(block.layer, block.notes))
        query_input, key_input, _ = block.notes.inputs(attn_in)
        wide = self.parts.query_from_input.dtype
        by_query, by_key = (torch.linalg.vector_norm(x, dim=-1, dtype=wide) for x in (query_input, key_input))
        # Keys without a token have no input.
        by_key = pad(by_key, (0, self.parts.key_from_input.shape[2] - by_key.shape[1]))
        terms = max(query_input.shape[-1], key_input.shape[-1])
        self.query, self.key = self.rounded(by_query, by_key, product_rounding(attn_in.dtype, terms))
        none = self.query.norm.new_zeros(self.query.norm.shape[1])
        self.residual: Float[Tensor, " head"] = none
        """The largest |Σ terms − score| so far, over visible pairs of real tokens; NaN if any is NaN."""
        self.largest: Float[Tensor, " head"] = none  # the largest |score| over the same pairs
        self.excess: Float[Tensor, " head"] = none
        """The largest |Σ terms − score|, in units of the difference that rounding can explain in its cell; the ledger
        is exact if this is at most 1."""

    def add(self, block: RowBlock, total: Float[Tensor, "batch head row key"] | None = None) -> None:
        """Compares one block of rows; `total` is the sum of its terms, if it is known already."""
        rows = slice(block.rows.start, block.rows.stop)
        keep = block.visible & block.real[:, None, :, None]
        width = block.scores.shape[-1]
        scores = torch.where(keep, block.scores, 0.0)
        total = self.parts.total(rows)[..., :width] if total is None else total
        difference = total - scores
        position = None if self.parts.position is None else self.parts.term("position", rows)[..., :width]
        query, key = self.query.at(lambda value: value[:, :, rows]), self.key.at(lambda value: value[:, :, :width])
        allowed = score_rounding(
            query, key, self.parts.scale, d_head=self.parts.query_from_input.shape[-1], score=scores, position=position
        )
        if self.parts.relative is not None:
            allowed = allowed + relative_rounding(self.parts.relative, query, key, self.parts.scale, rows)[..., :width]
        self.residual = torch.maximum(self.residual, _largest(difference, keep))
        self.largest = torch.maximum(self.largest, _largest(scores, keep))
        # A sum without terms must agree exactly.
        units = torch.where(difference == 0, 0.0, difference / allowed)
        self.excess = torch.maximum(self.excess, _largest(units, keep))

    def rounded(
        self, query_sum: Float[Tensor, "batch query"], key_sum: Float[Tensor, "batch key"], rounding: float
    ) -> tuple[Rounded, Rounded]:
        """The layer's queries and keys with the error of their entries, where the norms of the parts of their inputs
        add up to `sum`.

        δ = `rounding` · (sum · max_d ‖W_d‖ + max_d |b_d|) · max_d |m_d| + 4ε max_d |q_d|, with m the factor
        of a qk-norm and ε of the model's precision.
        """
        stack, parts, notes = self._stack, self.parts, self._block.notes
        weights = stack.weights(self._block.layer)
        group = stack.n_heads // stack.n_kv_heads
        sides = []
        for size, W, b, norm, from_input, from_bias, shared in (
            (query_sum, weights.W_Q, weights.b_Q, notes.query_norm, parts.query_from_input, parts.query_from_bias, 1),
            (key_sum, weights.W_K, weights.b_K, notes.key_norm, parts.key_from_input, parts.key_from_bias, group),
        ):
            value = from_input.abs()
            if from_bias is not None:
                value = value + by_position(from_bias).abs()
            summed = size[:, :, None] * torch.linalg.vector_norm(W.detach(), dim=1, dtype=size.dtype).amax(dim=-1)
            if b is not None:
                summed = summed + b.detach().abs().amax(dim=-1)
            if norm is not None:
                summed = summed * norm.multiplier.abs().amax(dim=-1)
            summed = repeat(summed, "batch position head -> batch (head shared) position", shared=shared)
            rounded = max(steps_rounding(self._dtype), steps_rounding(self._rotated))
            steps = rounded * value.amax(dim=-1) + least_rounding(self._dtype)
            sides.append(Rounded(torch.linalg.vector_norm(value, dim=-1), rounding * summed + steps))
        return sides[0], sides[1]

    def require_exact(self, heads: Sequence[int] | None = None) -> None:
        """Raises `ExactnessError`, naming the head whose terms are farthest off, if rounding cannot explain it."""
        chosen = list(range(len(self.excess))) if heads is None else list(heads)
        residual, excess = self.residual[chosen], self.excess[chosen]
        require_exact(self._block.layer, chosen, "the terms of its scores", residual, excess)

    def require_sources(
        self,
        query: Float[Tensor, "batch head cell d_head"],
        key: Float[Tensor, "batch head cell d_head"],
        cells: Cells,
        written: Float[Tensor, "batch position"],
    ) -> Float[Tensor, " head"]:
        """Compares Σ_s q_s(i) · Σ_t k_t(j), where s and t run over sources of the stream, with query_key of the ledger.

        `written` is the sum of the norms of the sources' contributions to `attn_in`. Returns the largest difference of
        each head, in the unit of scores; raises `ExactnessError` if rounding cannot explain one of them.
        """
        ledger = self.parts
        whole_query, whole_key = cells.of_queries(ledger.query_from_input), cells.of_keys(ledger.key_from_input)
        difference = ((query * key).sum(dim=-1) - (whole_query * whole_key).sum(dim=-1)) * ledger.scale
        difference = difference.masked_fill(cells.key_at < 0, 0.0)
        # The stream was rounded each time a source was added.
        rounding = product_rounding(self._dtype, self._stack.d_model) + steps_rounding(self._dtype)
        by_query, by_key = self.rounded(written, written, rounding)
        allowed = product_error(by_query.at(cells.of_queries), by_key.at(cells.of_keys), ledger.scale, query.shape[-1])
        excess = torch.where(difference == 0, 0.0, difference / allowed)
        residual, excess = (value.abs().amax(dim=(0, 2)) for value in (difference, excess))
        require_exact(self._block.layer, cells.heads, "the sources of its query_key", residual, excess)
        return residual


def require_exact(
    layer: int, heads: Sequence[int], what: str, residual: Float[Tensor, " head"], excess: Float[Tensor, " head"]
) -> None:
    """Raises `ExactnessError`, naming the one of `heads` whose sum is farthest from the model's, if it is too far.

    `excess` is the difference in units of the largest that rounding can explain; NaN counts as too far.
    """
    worst = int(excess.nan_to_num(torch.inf).argmax())
    if bool(excess[worst] <= 1):
        return
    raise ExactnessError(
        f"layer {layer}, head {heads[worst]}: {what} differ from the model's by up to {float(residual[worst]):.2e}, "
        f"{float(excess[worst]):.3g} times the most that rounding can explain. Does an active hook change the stream "
        "between its writers, or q, k or the scores? am.certify(model) says what else is wrong."
    )


def rotated_in(value: Float[Tensor, "batch head position d_head"], rotation: Rotation | None) -> torch.dtype:
    """The precision in which a model rotated its queries or keys, or to which it rounded them before rotating.

    Even in a float64 model, some families rotate in float32 (Llama 4), or pass float32 values to the rotation (Cohere).
    """
    if rotation is None or value.dtype != torch.float64:
        return value.dtype
    return torch.float32 if torch.float32 in {computed_in(value), computed_in(rotation.back(value))} else value.dtype


def _largest(value: Tensor, keep: Tensor) -> Float[Tensor, " head"]:
    """max |value| over the kept cells, per head; NaN if one of them is NaN."""
    return torch.where(keep, value.abs(), 0.0).amax(dim=(0, 2, 3))


def _by_head(norm: FrozenNorm | None, dtype: torch.dtype) -> FrozenNorm | None:
    if norm is None:
        return None

    def turned(value: Tensor) -> Tensor:
        return rearrange(value, "batch position head d_head -> batch head position d_head").to(dtype)

    return replace(
        norm,
        multiplier=turned(norm.multiplier),
        shift=None if norm.shift is None else turned(norm.shift),
        axes=(-3, -1) if len(norm.axes) == 2 else norm.axes,
    )
