"""The size and direction of what a head writes into the residual stream (docs/formulas.md#residual-updates).

    u_ih = z_ih W_O[h],    magnitude = ‖u‖ / ‖x‖,    orientation = cos(u, x),

with x the stream as it enters the block. Norms and products are computed from the d_head numbers of z: for a triangle R
with W_O[h] W_O[h]ᵀ = Rᵀ R, ‖z W_O‖ = ‖z Rᵀ‖ and u·x = z · (W_O x). No [token, head, d_model] array is made if there are
more tokens than d_head.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from .blocks import block_bytes
from .float64 import as_float64


class Writer:
    """What the heads of a layer write: the norm of z W_O, and its product with a stream.

    >>> z, W_O, x = torch.randn(1, 2, 3, 4), torch.randn(3, 4, 5), torch.randn(1, 2, 5)
    >>> (norm, product), = Writer(W_O).against(x, z)
    >>> u = z[0, 0, 1] @ W_O[1]
    >>> torch.allclose(norm[0, 1, 0], u.norm()), torch.allclose(product[0, 1, 0], u @ x[0, 0])
    (True, True)

    z and the values are `[batch position head d_head]`; `head` may be key-value heads that groups of heads share.
    """

    def __init__(self, W_O: Float[Tensor, "head d_head d_model"]) -> None:
        self._W_O = W_O

    def norm(self, z: Float[Tensor, "batch position kv_head d_head"]) -> Float[Tensor, "batch head position"]:
        """‖z W_O‖."""
        matrix = self._of_same_norm(z)
        return _by_text([_norm(self._by_head(part), matrix) for part in self._parts(z)], len(z))

    def against(
        self, x: Float[Tensor, "batch position d_model"], *z: Float[Tensor, "batch position _ d_head"]
    ) -> list[tuple[Float[Tensor, "batch head position"], Float[Tensor, "batch head position"]]]:
        """Returns ‖z W_O‖ and (z W_O)·x for each z."""
        norms: list[list[Tensor]] = [[] for _ in z]
        products: list[list[Tensor]] = [[] for _ in z]
        matrix = self._of_same_norm(x)
        for stream, *parts in zip(self._parts(x), *map(self._parts, z), strict=True):
            seen = linear(stream, self._W_O.flatten(0, 1)).view(len(stream), *self._W_O.shape[:2])
            for place, part in enumerate(parts):
                by_head = self._by_head(part)
                norms[place].append(_norm(by_head, matrix))
                products[place].append(torch.linalg.vecdot(by_head, seen).mT)
        both = zip(norms, products, strict=True)
        return [(_by_text(norm, len(x)), _by_text(product, len(x))) for norm, product in both]

    def _parts(self, values: Float[Tensor, "batch position ..."]) -> list[Float[Tensor, "token ..."]]:
        """Divides the tokens of all texts into parts whose products with the heads' W_O fill one block of memory."""
        heads, d_head, _ = self._W_O.shape
        tokens = max(1, block_bytes(values.device) // (heads * d_head * values.element_size()))
        flat = values.flatten(0, 1)
        return [flat[begin : begin + tokens] for begin in range(0, max(1, len(flat)), tokens)]

    def _by_head(self, z: Float[Tensor, "token kv_head d_head"]) -> Float[Tensor, "token head d_head"]:
        group = len(self._W_O) // z.shape[1]
        return z if group == 1 else z.repeat_interleave(group, dim=1)

    def _of_same_norm(self, values: Float[Tensor, "batch position ..."]) -> Float[Tensor, "head d_head _"]:
        """A matrix M with ‖z M‖ = ‖z W_O‖: W_O or, for many tokens, Rᵀ; factorising is slow off the CPU."""
        tokens, (heads, d_head, d_model) = values.shape[0] * values.shape[1], self._W_O.shape
        product_bytes = tokens * heads * d_model * self._W_O.element_size()
        fits = values.device.type != "cpu" and product_bytes <= block_bytes(values.device)
        return self._W_O if fits or tokens <= d_head else self._transposed_triangle

    @cached_property
    def _transposed_triangle(self) -> Float[Tensor, "head d_head row"]:
        # Of W_Oᵀ = Q R; a Cholesky factorisation of float64 products takes a third of QR's time and is more accurate.
        if self._W_O.dtype == torch.float32:
            wide = as_float64(self._W_O)
            lower, failed = torch.linalg.cholesky_ex(wide @ wide.mT)
            if not bool(failed.any()):
                return Tensor.to(lower, self._W_O)
        triangle: Tensor = torch.linalg.qr(self._W_O.mT, mode="r").R
        return triangle.mT


def _norm(z: Float[Tensor, "token head d_head"], matrix: Float[Tensor, "head d_head _"]) -> Float[Tensor, "head token"]:
    norm: Tensor = torch.linalg.vector_norm(torch.bmm(z.transpose(0, 1), matrix), dim=-1)
    return norm


def _by_text(parts: list[Float[Tensor, "head token"]], texts: int) -> Float[Tensor, "batch head position"]:
    together = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return together.view(len(together), texts, together.shape[1] // texts).transpose(0, 1)


def cosine(
    product: Float[Tensor, "*places"], one: Float[Tensor, "*places"], other: Float[Tensor, "*#places"]
) -> Float[Tensor, "*places"]:
    """Returns product / (one · other), from −1 to 1; 0 where one of the norms is 0, so that there is no direction."""
    norms = one * other
    return torch.where(norms > 0, product / norms.clamp_min(torch.finfo(norms.dtype).tiny), 0.0).clamp(-1, 1)


@dataclass(frozen=True)
class StreamPair:
    """The norms of two streams and their product, for every token."""

    norm: Float[Tensor, "*layers batch position"]  # ‖u‖
    stream: Float[Tensor, "*layers batch position"]  # ‖x‖
    product: Float[Tensor, "*layers batch position"]  # u · x
    rest: Float[Tensor, "*layers batch position"]  # ‖u − b c‖ for a constant c, a factor b per token; ‖u‖ without one


def compared(
    update: Float[Tensor, "batch position d_model"],
    stream: Float[Tensor, "batch position d_model"],
    constant: Float[Tensor, " d_model"] | None = None,
    by_token: Float[Tensor, "batch position"] | None = None,
) -> StreamPair:
    """Compares the update of a block with the stream that it is added to.

    >>> pair = compared(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]]), torch.tensor([3.0, 0.0]))
    >>> pair.norm.item(), pair.stream.item(), pair.product.item(), pair.rest.item()
    (5.0, 1.0, 3.0, 4.0)
    """
    norm, of_stream = (torch.linalg.vector_norm(vectors, dim=-1) for vectors in (update, stream))
    rest = norm
    if constant is not None:
        share = constant if by_token is None else by_token[..., None] * constant
        rest = torch.linalg.vector_norm(update - share, dim=-1)
    return StreamPair(norm, of_stream, torch.linalg.vecdot(update, stream), rest)
