"""By what a norm multiplied one stream: with that number kept, the norm is linear."""

import torch
from jaxtyping import Float
from torch import Tensor


def norm_multiplier(
    stream: Float[Tensor, "*places d_model"],
    normed: Float[Tensor, "*places d_model"],
    gamma: Float[Tensor, " d_model"],
    shift: Float[Tensor, " d_model"] | None = None,
    *,
    centred: bool = False,
) -> Float[Tensor, "*places"]:
    """r of normed = r · γ ⊙ (x − mean x) + β (a LayerNorm) or r · γ ⊙ x (an RMSNorm), read off stream and output.

    r = Σ (normed − β) y / Σ y², y = γ ⊙ (x − mean x) or γ ⊙ x; γ need be known up to a factor only. 0 where y is 0.

    >>> norm_multiplier(torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8]), torch.ones(2))
    tensor(0.2000)
    """
    y = gamma * (stream - stream.mean(dim=-1, keepdim=True) if centred else stream)
    size = y.pow(2).sum(dim=-1)
    product = ((normed if shift is None else normed - shift) * y).sum(dim=-1)
    return torch.where(size > 0, product / size, 0.0)
