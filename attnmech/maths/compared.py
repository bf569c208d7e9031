"""How does what a block adds to the stream compare with the stream, token by token?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .compiled import compiles, in_threads


@dataclass(frozen=True)
class Compared:
    """The norms of two streams and their product, for every token."""

    norm: Float[Tensor, "batch position"]
    """‖u‖."""
    stream: Float[Tensor, "batch position"]
    """‖x‖."""
    product: Float[Tensor, "batch position"]
    """u · x."""
    rest: Float[Tensor, "batch position"]
    """‖u − b c‖ for a constant c and a factor b for each token; ‖u‖ without a constant."""


def compared(
    update: Float[Tensor, "batch position d_model"],
    stream: Float[Tensor, "batch position d_model"],
    constant: Float[Tensor, " d_model"] | None = None,
    by_token: Float[Tensor, "batch position"] | None = None,
) -> Compared:
    """What a block adds against the stream that it adds it to.

    >>> found = compared(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]]), torch.tensor([3.0, 0.0]))
    >>> found.norm.item(), found.stream.item(), found.product.item(), found.rest.item()
    (5.0, 1.0, 3.0, 4.0)
    """
    factors = update.new_ones(update.shape[:2]) if by_token is None else by_token
    if compiles(update):
        return _compared(update, stream, update.new_empty(0) if constant is None else constant, factors)
    norm, of_stream = (torch.linalg.vector_norm(each, dim=-1) for each in (update, stream))
    rest = norm if constant is None else torch.linalg.vector_norm(update - factors[..., None] * constant, dim=-1)
    return Compared(norm, of_stream, torch.linalg.vecdot(update, stream), rest)


def _compared(update: Tensor, stream: Tensor, constant: Float[Tensor, " _"], factors: Tensor) -> Compared:
    """The same in one reading, where it can be compiled."""
    from .stream_loops import shared_compare

    loop: Callable[..., None] = shared_compare
    found = update.new_empty(4, factors.numel())
    streams = (each.flatten(0, 1).contiguous().numpy() for each in (update, stream))
    of_tokens = (factors.flatten().contiguous().numpy(), found.numpy())
    in_threads(factors.numel(), update.shape[-1], loop, (*streams, constant.contiguous().numpy(), *of_tokens))
    norm, of_stream, product, rest = found.view(4, *factors.shape)
    return Compared(norm, of_stream, product, rest if len(constant) else norm)
