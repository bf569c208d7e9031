"""Computes the steps of a block: the stream to which the MLP adds, the end of a post-norm block, and a norm's scales.

A pre-norm block ends as resid_post = resid_mid + mlp_out, a post-norm block as resid_post = N_post(N_mid(resid_mid) +
mlp_out). In a post-norm decoder, cross-attention and its norm come between the two sums: the MLP then adds to
N_cross(N_mid(resid_mid) + cross.attn_out).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.observed import LayerEnd
from ..parts.norms import NormScale, norm_scale
from .stack import Stack

Norm: TypeAlias = Callable[[Tensor], Tensor]  # a norm module, or its `forward`, which triggers no hooks


@dataclass(frozen=True)
class PostNormEnd:
    """The end of a post-norm block, from `resid_mid` on.

    >>> end = PostNormEnd(lambda x: 2 * x, lambda x: 10 * x)
    >>> end(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.0]))
    tensor([25., 60.])
    """

    mid_norm: Norm  # its output is the stream that the MLP reads and to which it adds
    post_norm: Norm

    @classmethod
    def of(cls, stack: Stack, layer: int) -> "PostNormEnd":
        """Finds the last two norms of a block; calling them triggers no hooks."""
        plan = stack.architecture
        assert plan.mid_norm is not None and plan.post_norm is not None
        return cls(stack.module(layer, plan.mid_norm).forward, stack.module(layer, plan.post_norm).forward)

    def before_norm(
        self, resid_mid: Float[Tensor, "*places d_model"], mlp_out: Float[Tensor, "*#places d_model"]
    ) -> Float[Tensor, "*places d_model"]:
        """N_mid(resid_mid) + mlp_out, the stream that the last norm reads."""
        return self.mid_norm(resid_mid) + mlp_out

    def __call__(
        self, resid_mid: Float[Tensor, "*places d_model"], mlp_out: Float[Tensor, "*#places d_model"]
    ) -> Float[Tensor, "*places d_model"]:
        return self.post_norm(self.before_norm(resid_mid, mlp_out))


def before_mlp(stack: Stack, end: LayerEnd) -> Float[Tensor, "batch position d_model"]:
    """The stream to which the MLP adds: after attention or, in post-norm models, after the norm that follows attention.

    In parallel blocks this is the input of the block, in a decoder the stream after cross-attention.
    """
    plan = stack.architecture
    if "resid_mid" not in end:
        return end["resid_pre"]
    if plan.interposed and plan.norm == "post":
        assert end.notes.before_mlp is not None
        return end.notes.before_mlp
    if plan.interposed:
        return end["resid_post"] - end["mlp_out"]
    return end["resid_mid"] if plan.norm == "pre" else PostNormEnd.of(stack, end.layer).mid_norm(end["resid_mid"])


def attention_scale(stack: Stack, end: LayerEnd, precision: torch.dtype) -> NormScale:
    """The factors by which the norm between attention and stream (Gemma 2) multiplied `attn_raw`; ones without one."""
    path = stack.architecture.attn_out
    norm = stack.module(end.layer, path) if path else None
    factor = stack.architecture.attn_scale
    out = end["attn_out"]
    scale = norm_scale(norm, end["attn_raw"], out if factor == 1 else out / factor, precision)
    return replace(scale, by_token=factor * scale.by_token)
