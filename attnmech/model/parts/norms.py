"""Reads the norms of a model: γ and ε from their modules, and a norm frozen at its scales for one stream.

The equations are in `attnmech.maths.norms`. Nothing here triggers a hook, since norms are run by their `forward`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.float64 import as_float64
from ...maths.norms import FrozenNorm, norm_multiplier, reciprocal_rms
from ...maths.precision import pass_tolerance
from .weights import as_stored, bias_of


def weight_of(norm: nn.Module, like: Float[Tensor, "*places d_model"]) -> Float[Tensor, " d_model"]:
    """The weight of a norm; ones, on the device of `like`, if it has none (an option of OPT)."""
    weight = as_stored(norm, "weight")
    return like.new_ones(like.shape[-1]) if weight is None else weight


def epsilon_of(norm: nn.Module) -> float:
    """The ε of a norm; 0 for an identity module."""
    if isinstance(norm, nn.Identity):
        return 0.0
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    epsilon = next((getattr(norm, name) for name in names if hasattr(norm, name)), None)
    if not isinstance(epsilon, int | float):
        raise UnsupportedModelError(f"a norm of kind {type(norm).__name__} has no attribute for its ε.")
    return epsilon


def is_centred(norm: nn.Module, like: Float[Tensor, "*places d_model"]) -> bool:
    """Whether a norm subtracts the mean. If it does, it maps any constant vector to its shift β, whatever its class."""
    if isinstance(norm, nn.LayerNorm):
        return True
    made: Tensor = norm.forward(like.new_ones(like.shape[-weight_of(norm, like).ndim :]))
    shift = bias_of(norm)
    return not bool((made if shift is None else made - shift).any())


@dataclass(frozen=True)
class NormKind:
    """The formula of a norm: N(x) = (weight + offset) ⊙ x · r, of x minus its mean if `centred`, plus β."""

    centred: bool
    offset: float


def kind_of(norm: nn.Module, x: Float[Tensor, "*places d_model"]) -> NormKind | None:
    """The formula of a norm, identified by its values; None if it computes something else."""
    try:
        weight, epsilon = as_float64(weight_of(norm, x).detach()), epsilon_of(norm)
        computed: Tensor = as_float64(norm.forward(x).detach())
        centred = is_centred(norm, x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError, UnsupportedModelError):
        return None
    shift = bias_of(norm)
    stream = as_float64(x)
    stream = stream - stream.mean(dim=-1, keepdim=True) if centred else stream
    unit = stream * reciprocal_rms(stream, epsilon)[..., None]
    shifted = 0.0 if shift is None else as_float64(shift.detach())
    formulas = {offset: (weight + offset) * unit + shifted for offset in (0.0, 1.0)}
    if computed.shape != formulas[0.0].shape:
        return None
    # For a large weight, an offset of 1 may lie within the tolerance; the nearer formula is the right one.
    offset = min(formulas, key=lambda offset: float((computed - formulas[offset]).norm()))
    formula = formulas[offset]
    return (
        NormKind(centred, offset) if (computed - formula).norm() <= pass_tolerance(x.dtype) * formula.norm() else None
    )


@dataclass(frozen=True, eq=False)
class WideNorm:
    """A norm in the precision of its input, whatever the model's: γ ⊙ (x − mean x) · r + β, or γ ⊙ x · r."""

    gamma: Float[Tensor, " width"]
    beta: Float[Tensor, " width"] | None
    epsilon: float
    centred: bool

    def __call__(self, x: Float[Tensor, "*places width"]) -> Float[Tensor, "*places width"]:
        x = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        normed: Tensor = self.gamma.to(x) * x * reciprocal_rms(x, self.epsilon)[..., None]
        return normed if self.beta is None else normed + self.beta.to(x)


def factor_by_dimension(module: nn.Module, x: Float[Tensor, "*places d_model"]) -> Float[Tensor, " d_model"] | None:
    """γ of a module that multiplies each dimension by a separate number (LayerScale); None for any other, norms
    included.

    >>> class Scale(nn.Module):
    ...     def forward(self, x):
    ...         return x * torch.tensor([2.0, 3.0])
    >>> factor_by_dimension(Scale(), torch.ones(4, 2)).tolist()
    [2.0, 3.0]
    >>> factor_by_dimension(nn.LayerNorm(2), torch.ones(4, 2)) is None
    True
    """
    if any("eps" in name for name in vars(module)) or isinstance(module, nn.LayerNorm | nn.Linear):
        return None
    basis = torch.stack((x.new_ones(x.shape[-1]), -4 * x.new_ones(x.shape[-1])))
    try:
        once, again = module.forward(basis)
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    gamma: Tensor = once.detach()
    # A norm returns the same value for all multiples of a vector of ones.
    return gamma if torch.equal(again, -4 * once) and torch.equal(module.forward(x), x * gamma) else None


def gamma_of(norm: nn.Module, x: Float[Tensor, "*places d_model"]) -> Float[Tensor, " d_model"]:
    """The γ of a norm of x, or of a module that multiplies each dimension by a separate number."""
    scale = factor_by_dimension(norm, x)
    if scale is not None:
        return scale
    if is_centred(norm, x):
        kind = None if type(norm) is nn.LayerNorm else kind_of(norm, x)
        return weight_of(norm, x).detach() + (0.0 if kind is None else kind.offset)
    # An RMSNorm maps ones to its weight over √(1 + ε), including whatever the family adds to the weight.
    made: Tensor = norm.forward(x.new_ones(x.shape[-weight_of(norm, x).ndim :]))
    gamma: Tensor = made * (1 + epsilon_of(norm)) ** 0.5
    return gamma


def frozen_norm(
    norm: nn.Module,
    x: Float[Tensor, "*places d_model"],
    precision: torch.dtype,
    normed: Float[Tensor, "*places d_model"] | None = None,
) -> FrozenNorm:
    """A norm frozen at its scales for x, with its shift β; `normed` is N(x), if it is known already."""
    scale = factor_by_dimension(norm, x)
    if scale is not None:
        return FrozenNorm(scale.to(precision).expand(x.shape), False, None)
    shift = bias_of(norm)
    shift = None if shift is None else shift.detach().to(precision)
    made: Tensor = norm.forward(x) if normed is None else normed
    stream, made, gamma = (value.to(precision) for value in (x, made, gamma_of(norm, x)))
    epsilon = epsilon_of(norm)
    at_zero = 1.0 if epsilon == 0 else epsilon**-0.5
    return FrozenNorm.of(stream, made, gamma, shift, centred=is_centred(norm, x), at_zero=at_zero)


@dataclass(frozen=True)
class NormScale:
    """The factors by which an RMSNorm multiplied one stream: N(a) = by_token · by_dimension ⊙ a.

    `by_dimension` can be folded into the matrix that writes a; `by_token` then multiplies the result.
    """

    by_dimension: Float[Tensor, " d_model"] | None  # None if there is no norm
    by_token: Float[Tensor, "batch position"]

    def folded(self, written: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """A write to the stream, with `by_dimension` folded in."""
        return written if self.by_dimension is None else written * self.by_dimension


def norm_scale(
    norm: nn.Module | None,
    x: Float[Tensor, "batch position d_model"],
    normed: Float[Tensor, "batch position d_model"],
    precision: torch.dtype,
) -> NormScale:
    """The factors of an RMSNorm, computed from its own input and output; ones if there is no norm."""
    stream = x.to(precision)
    if norm is None:
        return NormScale(None, stream.new_ones(stream.shape[:2]))
    by_dimension = gamma_of(norm, x).to(precision)
    if factor_by_dimension(norm, x) is not None:
        return NormScale(by_dimension, stream.new_ones(stream.shape[:2]))
    return NormScale(by_dimension, norm_multiplier(stream, normed.to(precision), by_dimension))
