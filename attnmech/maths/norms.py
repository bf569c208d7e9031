"""Norms that are frozen at the factor by which they multiplied one stream, which makes them linear.

A LayerNorm is N(x) = r γ ⊙ (x − mean x) + β with r = 1 / √(var x + ε), an RMSNorm N(x) = r γ ⊙ x with
r = 1 / √(mean x² + ε).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def reciprocal_rms(x: Float[Tensor, "*places d_model"], epsilon: float) -> Float[Tensor, "*places"]:
    """Returns r = 1 / √(mean x² + ε) of an RMSNorm, or of a LayerNorm if x is the stream minus its mean.

    >>> reciprocal_rms(torch.tensor([3.0, 5.0]), 8.0)
    tensor(0.2000)
    """
    return (x.pow(2).mean(dim=-1) + epsilon).rsqrt()


def norm_multiplier(
    stream: Float[Tensor, "*places d_model"],
    normed: Float[Tensor, "*places d_model"],
    gamma: Float[Tensor, "*#heads d_model"],
    shift: Float[Tensor, "*#heads d_model"] | None = None,
    *,
    centred: bool = False,
) -> Float[Tensor, "*places"]:
    """r of normed = r · γ ⊙ (x − mean x) + β (a LayerNorm) or r · γ ⊙ x (an RMSNorm), from stream and output.

    r = Σ (normed − β) y / Σ y², y = γ ⊙ (x − mean x) or γ ⊙ x; γ need only be right up to a factor. 0 where y is 0.

    >>> norm_multiplier(torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8]), torch.ones(2))
    tensor(0.2000)
    """
    y = gamma * (stream - stream.mean(dim=-1, keepdim=True) if centred else stream)
    size = y.pow(2).sum(dim=-1)
    product = ((normed if shift is None else normed - shift) * y).sum(dim=-1)
    return torch.where(size > 0, product / size, 0.0)


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with its multipliers fixed at the values for one stream: F, a linear map.

    >>> x, out = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.6, 0.8]]])
    >>> norm = FrozenNorm.of(x, out, torch.ones(2), None, centred=False)
    >>> norm(torch.tensor([[[1.0, 10.0]]]))
    tensor([[[0.2000, 2.0000]]])
    """

    multiplier: Float[Tensor, "*places d_model"]
    centred: bool  # whether the norm subtracts the mean first
    shift: Float[Tensor, "*#places d_model"] | None = None
    """β, which is not part of the map."""
    axes: tuple[int, ...] = (-1,)  # the axes of the mean; two if one norm covers the queries of all heads

    def __call__(self, part: Float[Tensor, "*places d_model"]) -> Float[Tensor, "*places d_model"]:
        """Applies F to one part of the stream, without the shift."""
        return self.multiplier * (part - part.mean(dim=self.axes, keepdim=True) if self.centred else part)

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "*places d_model"],
        out: Float[Tensor, "*places d_model"],
        gamma: Float[Tensor, "*#heads d_model"],
        shift: Float[Tensor, "*#heads d_model"] | None,
        *,
        centred: bool,
        at_zero: float = 0.0,
    ) -> "FrozenNorm":
        """Freezes a norm, given the stream x and the norm's output; its weight `gamma` need only be right up to a
        factor.

        The multiplier is r γ, with one number r per token. If `out` is purely a product of x, it is `out` / x, entry by
        entry: an RMSNorm computes that product in float32 whatever the model's precision, so its rounding is part of
        the multiplier. `at_zero` is r of a stream of zeros, 1 / √ε.
        """
        scale = norm_multiplier(x, out, gamma, shift, centred=centred)
        multiplier = gamma * torch.where((x == 0).all(dim=-1), at_zero, scale)[..., None]
        if shift is None and not centred:
            multiplier = torch.where(x == 0, multiplier, out / x)
        return cls(multiplier, centred, shift)
