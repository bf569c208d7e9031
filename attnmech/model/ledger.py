"""From a row block of a model's attention to the parts of its score ledger: which weights, which rotation."""

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from ..maths.scores import Rotation, ScoreParts, score_parts
from .architectures import Architecture
from .attention import LayerFacts, RowBlock

if TYPE_CHECKING:
    from .hooked import HookedModel


def parts_of(
    model: "HookedModel",
    block: RowBlock | LayerFacts,
    attn_in: Float[Tensor, "batch position d_model"],
    visible: Bool[Tensor, "batch 1 query key"],
    *,
    fold_norm: bool = False,
) -> ScoreParts:
    """The score ledger of one layer, from its input, its weights and the model's own position tensors.

    With `fold_norm` the shift β of the norm that made `attn_in` counts as bias. In half precision the parts
    are computed in float32.
    """
    stack = model.stacks[block.stack]
    plan, weights = stack.architecture, stack.weights(block.layer)
    wide = torch.promote_types(attn_in.dtype, torch.float32)

    def widen(value: Tensor | None) -> Tensor | None:
        # Always a copy: a result must not change when somebody trains the model on.
        return None if value is None else value.detach().to(wide, copy=True)

    key_input = block.notes.key_input
    return score_parts(
        attn_in.to(wide),
        weights.W_Q.detach().to(wide),
        widen(weights.b_Q),
        weights.W_K.detach().to(wide),
        widen(weights.b_K),
        scale=block.scale * plan.query_scale,
        position=None if block.position is None or not plan.positioned else block.position.to(wide),
        visible=visible,
        rotate=_rotation(plan, block, wide),
        key_x=None if key_input is None else key_input.to(wide),
        query_norm=_by_head(block.notes.query_norm, wide),
        key_norm=_by_head(block.notes.key_norm, wide),
        softcap=block.softcap,
        sink=widen(block.sink),
        shift=widen(stack.input_shift(block.layer)) if fold_norm else None,
    )


def _rotation(plan: Architecture, block: RowBlock | LayerFacts, dtype: torch.dtype) -> Rotation | None:
    rotary = plan.rotary
    if rotary is None:
        return None
    assert block.notes.rotary is not None
    cos, sin = (table[:, None].to(dtype) for table in block.notes.rotary)
    return lambda x: rotary.rotate(x, cos, sin)


def _by_head(factor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if factor is None:
        return None
    return rearrange(factor, "batch position head d_head -> batch head position d_head").to(dtype)
