"""Metrics of an output, token by token: cross-entropy, divergence from another output, and answers compared with
others.

All functions take logits `[row vocab]` and return one number per row, in float32 at least.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError


def require_logits(tokens: Int[Tensor, "*places"], count: int) -> None:
    """Raises `InputError` for a token without a logit, as in a model whose head has fewer rows than its embedding."""
    highest = int(tokens.max()) if tokens.numel() else 0
    if highest >= count:
        raise InputError(
            f"token {highest} has no logit; the head has logits of tokens 0 to {count - 1}. Leave the token out."
        )


def log_probabilities(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def cross_entropy(logits: Float[Tensor, "row vocab"], target: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """Returns −ln p(target), in nats; raises `InputError` for a target without a logit.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """
    require_logits(target, logits.shape[1])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(wide, target, reduction="none")


def divergence(logits: Float[Tensor, "row vocab"], clean: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Returns KL(clean ‖ now) = Σ_w p_clean(w) (ln p_clean(w) − ln p(w)), in nats."""
    before, now = log_probabilities(clean), log_probabilities(logits)
    return (before.exp() * (before - now)).sum(dim=-1)


def logit_difference(
    logits: Float[Tensor, "row vocab"], answer: Int[Tensor, " row"], against: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Returns logit(answer) − logit(against), the log of the ratio of their probabilities."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide.gather(1, answer[:, None]) - wide.gather(1, against[:, None]))[:, 0]


def accuracy(
    logits: Float[Tensor, "row vocab"], answer: Int[Tensor, " row"], against: Int[Tensor, " row"] | None = None
) -> Float[Tensor, " row"]:
    """Returns 1 where the answer's logit is above that of `against`, or of every other token; else, and for ties, 0."""
    right = logits.gather(1, answer[:, None])
    if against is not None:
        others = logits.gather(1, against[:, None])
    else:
        others = logits.scatter(1, answer[:, None], -torch.inf).amax(dim=1, keepdim=True)
    return (right > others)[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
