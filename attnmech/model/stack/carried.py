"""What a head's weights read and write: the norm before attention, and f(x_j) = v_j W_O with its length."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import InputError
from ...maths.flow import value_norms
from ...points import PointKey, split_stack
from ..parts.norms import WideNorm, epsilon_of, gamma_of, kind_of, weight_of
from .stack import Stack


def input_norm(
    stack: Stack, layer: int, x: Float[Tensor, "*places d_model"], precision: torch.dtype
) -> WideNorm | None:
    """The norm before a layer's attention, without its shift β; None if there is none. `x` is some of the stream.

    Raises `InputError` if its formula is unknown.
    """
    path = stack.architecture.attn_norm
    if path is None:
        return None
    norm = stack.module(layer, path)
    kind = kind_of(norm, x)
    if kind is None:
        raise InputError(
            f"the norm before attention in layer {layer} is neither a LayerNorm nor an RMSNorm, so its output for "
            "a token alone is not known in float32."
        )
    return WideNorm(weight_of(norm, x).detach().to(precision) + kind.offset, None, epsilon_of(norm), kind.centred)


def output_weights(stack: Stack, layer: int, precision: torch.dtype) -> Float[Tensor, "head d_value d_model"]:
    """W_O of a layer, times the γ of the norm between attention and stream, if there is one (Gemma 2).

    The norm's factor for each query is left out, since it is the same for all keys of a row.
    """
    W_O = stack.weights(layer).W_O.detach().to(precision)
    path = stack.architecture.attn_out
    if not path or path == stack.architecture.out:
        return W_O
    norm = stack.module(layer, path)
    return W_O * gamma_of(norm, W_O[0, :1].to(next(norm.parameters(), W_O).dtype)).detach().to(precision)


def values_read(
    v: Float[Tensor, "*places d_value"], stack: Stack, *, by_global: bool = False
) -> Float[Tensor, "*places d_value"]:
    """The values that a row reads: v or, in heads with two halves (Longformer), the half for local or global tokens."""
    if not stack.architecture.windows:
        return v
    local, of_global = v.chunk(2, dim=-1)
    parts = (torch.zeros_like(local), of_global) if by_global else (local, torch.zeros_like(of_global))
    return torch.cat(parts, dim=-1)


def captured_norms(stacks: Mapping[str, Stack], values: Mapping[PointKey, Tensor]) -> dict[PointKey, Tensor]:
    """‖f(x_j)‖ `[batch head key]` for each layer whose pattern and v a run captured, by the key of the pattern.

    A layer is left out if a gate (Qwen3-Next, Longformer) or a norm (BitNet) between attention and W_O makes f depend
    on the query.
    """
    by_point: dict[PointKey, Tensor] = {}
    for name, layer in values:
        label, base = split_stack(name)
        if base != "pattern" or layer is None:
            continue
        stack = stacks[label]
        v = values.get((stack.point("v"), layer))
        if v is None or stack.architecture.gate is not None:
            continue
        wide = v.detach().to(torch.promote_types(v.dtype, torch.float32))
        norms = value_norms(wide, output_weights(stack, layer, wide.dtype).to(wide.device))
        by_point[name, layer] = norms.transpose(1, 2)
    return by_point
