"""What a norm between attention and stream (Gemma 2) makes of what each head writes, frozen at its values."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..maths.norms import norm_multiplier
from ..model.observed import LayerEnd
from ..model.stack import Stack


@dataclass(frozen=True)
class NormScale:
    """What such a norm multiplies by; ones where there is none."""

    by_dimension: Float[Tensor, " d_model"]
    by_token: Float[Tensor, "batch position"]


def norm_scale(stack: Stack, end: LayerEnd, precision: torch.dtype) -> NormScale:
    """N(a) = by_token · by_dimension ⊙ a, read off the norm's own input and output: `attn_raw` and `attn_out`."""
    raw, out = end["attn_raw"].to(precision), end["attn_out"].to(precision)
    if not stack.architecture.attn_out:
        return NormScale(raw.new_ones(raw.shape[-1]), raw.new_ones(raw.shape[:2]))
    norm = stack.module(end.layer, stack.architecture.attn_out)
    # What an RMS norm makes of ones is its weight, whatever the family adds to it; `forward` sets off no hook.
    by_dimension = norm.forward(end["attn_raw"].new_ones(raw.shape[-1])).to(precision)
    return NormScale(by_dimension, norm_multiplier(raw, out, by_dimension))
