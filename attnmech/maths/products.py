"""The product x W for every head."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear


def product_by_head(
    x: Float[Tensor, "*batch position d_in"], W: Float[Tensor, "head d_in d_head"]
) -> Float[Tensor, "*batch head position d_head"]:
    """Computes x W for every head as one matrix product.

    >>> import torch
    >>> x, W = torch.randn(2, 3, 4), torch.randn(5, 4, 6)
    >>> torch.allclose(product_by_head(x, W)[1, 4], x[1] @ W[4], atol=1e-5)
    True
    """
    made = linear(x, rearrange(W, "head d_in d_head -> (head d_head) d_in"))
    return rearrange(made, "... position (head d_head) -> ... head position d_head", head=len(W))
