"""Compares what a block adds to the stream with the stream itself, token by token."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class StreamPair:
    """The norms of two streams and their product, for every token."""

    norm: Float[Tensor, "*layers batch position"]
    """‖u‖."""
    stream: Float[Tensor, "*layers batch position"]
    """‖x‖."""
    product: Float[Tensor, "*layers batch position"]
    """u · x."""
    rest: Float[Tensor, "*layers batch position"]
    """‖u − b c‖ for a constant c and one factor b per token; ‖u‖ without a constant."""


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
