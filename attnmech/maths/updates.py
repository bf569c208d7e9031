"""How much a head writes into the residual stream, and in which direction (formulas §1).

    u_ih = z_ih W_O[h],    magnitude = ‖u‖ / ‖x‖,    orientation = cos(u, x),

with x the stream as it enters the block. Norms and products come from the heads' d_head numbers: with a triangle R for
which W_O[h] W_O[h]ᵀ = Rᵀ R, ‖z W_O‖ = ‖z Rᵀ‖, and u·x = z · (W_O x), so that no [token, head, d_model] array is made.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor


class Writer:
    """What the heads of a layer write: the norm of z W_O, and its product with the stream.

    >>> z, W_O, x = torch.randn(1, 2, 3, 4), torch.randn(3, 4, 5), torch.randn(1, 2, 5)
    >>> writer = Writer(W_O, x)
    >>> torch.allclose(writer.norm(z)[0, 1, 0], (z[0, 0, 1] @ W_O[1]).norm())
    True
    """

    def __init__(self, W_O: Float[Tensor, "head d_head d_model"], x: Float[Tensor, "batch position d_model"]) -> None:
        self._triangle = _triangle(W_O)
        self._seen = einsum(x, W_O, "batch position d_model, head d_head d_model -> batch head position d_head")

    def norm(self, z: Float[Tensor, "batch position head d_head"]) -> Float[Tensor, "batch head position"]:
        """‖z W_O‖."""
        rotated = einsum(z, self._triangle, "batch position head d_head, head row d_head -> batch head position row")
        norm: Tensor = torch.linalg.vector_norm(rotated, dim=-1)
        return norm

    def product(self, z: Float[Tensor, "batch position head d_head"]) -> Float[Tensor, "batch head position"]:
        """(z W_O)·x."""
        return einsum(z, self._seen, "batch position head d_head, batch head position d_head -> batch head position")


def _triangle(W_O: Float[Tensor, "head d_head d_model"]) -> Float[Tensor, "head row d_head"]:
    """R of W_Oᵀ = Q R for every head.

    In float32, by Cholesky from products in float64: a third of the time, and closer than QR in float32.
    """
    if W_O.dtype == torch.float32:
        wide = W_O.double()
        lower, failed = torch.linalg.cholesky_ex(wide @ wide.mT)
        if not bool(failed.any()):
            return Tensor.to(lower.mT, W_O.dtype)
    found: Tensor = torch.linalg.qr(W_O.mT, mode="r").R
    return found


def cosine(
    product: Float[Tensor, "*places"], one: Float[Tensor, "*places"], other: Float[Tensor, "*#places"]
) -> Float[Tensor, "*places"]:
    """product / (one · other), from −1 to 1; 0 where one of the norms is 0 and there is no direction."""
    norms = one * other
    return torch.where(norms > 0, product / norms.clamp_min(torch.finfo(norms.dtype).tiny), 0.0).clamp(-1, 1)
