"""What do a model's norms do? γ and ε as their modules hold them, and a norm frozen at its scales for one stream.

The equations are in `attnmech.maths.norms`. Nothing here triggers a hook: norms are called by their `forward`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..maths.norms import FrozenNorm, norm_multiplier, reciprocal_rms
from .weights import bias_of


def weight_of(norm: nn.Module, like: Float[Tensor, "*places d_model"]) -> Float[Tensor, " d_model"]:
    """The weight of a norm as its module holds it; ones, on the device of `like`, if it has none (OPT's option)."""
    weight = norm.weight
    return weight if isinstance(weight, torch.Tensor) else like.new_ones(like.shape[-1])


def epsilon_of(norm: nn.Module) -> float:
    """The ε of a norm."""
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    assert isinstance(epsilon, int | float)
    return epsilon


def gamma_of(norm: nn.Module, x: Float[Tensor, "*places d_model"]) -> Float[Tensor, " d_model"]:
    """The γ of a norm of x; that of an RMSNorm up to a factor."""
    if isinstance(norm, nn.LayerNorm):
        return weight_of(norm, x).detach()
    # What an RMSNorm makes of ones is its weight up to a factor, whatever the family adds to it.
    gamma: Tensor = norm.forward(x.new_ones(x.shape[-1]))
    return gamma


def frozen_norm(
    norm: nn.Module, x: Float[Tensor, "batch position d_model"], precision: torch.dtype
) -> tuple[FrozenNorm, Float[Tensor, " d_model"] | None]:
    """A norm frozen at its scales for x, without its shift β; and that shift, None if it has none."""
    shift = bias_of(norm)
    shift = None if shift is None else shift.detach().to(precision)
    stream, normed, gamma = (each.to(precision) for each in (x, norm.forward(x), gamma_of(norm, x)))
    return FrozenNorm.of(stream, normed, gamma, shift, centred=isinstance(norm, nn.LayerNorm)), shift


@dataclass(frozen=True)
class NormScale:
    """What an RMSNorm multiplied one stream by, in two factors: N(a) = by_token · by_dimension ⊙ a.

    `by_dimension` can be folded into the matrix that writes a, and `by_token` multiplied with the result.
    """

    by_dimension: Float[Tensor, " d_model"]
    by_token: Float[Tensor, "batch position"]


def norm_scale(
    norm: nn.Module | None,
    given: Float[Tensor, "batch position d_model"],
    normed: Float[Tensor, "batch position d_model"],
    precision: torch.dtype,
) -> NormScale:
    """The factors of an RMSNorm, computed from its own input and output; ones if there is no norm."""
    stream = given.to(precision)
    if norm is None:
        return NormScale(stream.new_ones(stream.shape[-1]), stream.new_ones(stream.shape[:2]))
    by_dimension = gamma_of(norm, given).to(precision)
    return NormScale(by_dimension, norm_multiplier(stream, normed.to(precision), by_dimension))


def entry_multiplier(
    norm: nn.Module, given: Float[Tensor, "*places d_head"], normed: Float[Tensor, "*places d_head"]
) -> Float[Tensor, "*places d_head"]:
    """The factor by which an RMSNorm multiplied each entry: normed / given, or the formula r γ where that is 0 / 0."""
    by_formula = weight_of(norm, given) * reciprocal_rms(given, epsilon_of(norm))[..., None]
    return torch.where(given == 0, by_formula, normed / given)
