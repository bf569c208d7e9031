"""The divergence between the patterns of heads, and the effective number of heads (docs/formulas.md#similar-heads).

The Jensen-Shannon divergence JS(p, q) = H((p + q) / 2) − (H(p) + H(q)) / 2 is symmetric, 0 for p = q and at most ln 2.
Its root is a metric that embeds in a Euclidean space (Fuglede & Topsøe 2004), and ln 2 − JS is a positive definite
kernel (Martins et al. 2009); so are means of these over rows.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .float64 import as_float64


def jensen_shannon(one: Float[Tensor, "*places key"], other: Float[Tensor, "*places key"]) -> Float[Tensor, "*places"]:
    """Returns ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, in nats; at most ln 2.

    >>> jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).exp()
    tensor(2.)
    """
    return _from_middle(one, other, torch.xlogy(one, one), torch.xlogy(other, other))


def between_heads(
    one: Float[Tensor, "*rows head key"], other: Float[Tensor, "*rows other_head key"]
) -> Float[Tensor, "*rows head other_head"]:
    """Computes the Jensen-Shannon divergence of every head of `one` from every head of `other`, row by row.

    >>> between_heads(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])).exp()
    tensor([[1., 2.]])
    """
    first, second = torch.xlogy(one, one), torch.xlogy(other, other)
    heads = [slice(head, head + 1) for head in range(one.shape[-2])]
    # Head by head, so that no tensor is larger than the patterns.
    return torch.stack([_from_middle(one[..., head, :], other, first[..., head, :], second) for head in heads], dim=-2)


def among_heads(pattern: Float[Tensor, "*rows head key"]) -> Float[Tensor, "*rows pair"]:
    """Computes the Jensen-Shannon divergence of every pair of heads, in the order of `torch.triu_indices(head, head,
    1)`.

    >>> among_heads(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])).exp()
    tensor([1., 2., 2.])
    """
    own, heads = torch.xlogy(pattern, pattern), pattern.shape[-2]
    by_head = [
        _from_middle(
            pattern[..., head : head + 1, :], pattern[..., head + 1 :, :], own[..., head : head + 1, :],
            own[..., head + 1 :, :],
        )
        for head in range(heads - 1)
    ]  # fmt: skip
    return torch.cat(by_head, dim=-1) if by_head else pattern.new_zeros(*pattern.shape[:-2], 0)


def _from_middle(one: Tensor, other: Tensor, one_log: Tensor, other_log: Tensor) -> Tensor:
    """Σ ½ p ln p + ½ q ln q − m ln m, from p ln p and q ln q."""
    # Subtracted key by key, p = q gives exactly 0. In Σ p ln(p / m), half of the smallest p rounds to m = 0.
    middle = (one + other) / 2
    return ((one_log + other_log) / 2 - torch.xlogy(middle, middle)).sum(dim=-1).clamp_min(0)


def effective_number(divergence: Float[Tensor, "*layers head head"]) -> Float[Tensor, "*layers"]:
    """Computes the Vendi score exp(−Σ λ ln λ), with λ the eigenvalues of K / n and K = 1 − JS / ln 2.

    It ranges from 1, if all heads attend alike, to n, if no two attend to the same key. K is positive semidefinite, so
    the λ are the shares of a spectrum and sum to 1. NaN where a divergence is NaN.

    >>> apart = math.log(2)
    >>> effective_number(torch.tensor([[0, 0, apart], [0, 0, apart], [apart, apart, 0]])).round(decimals=3)
    tensor(1.8900)

    Source: Friedman & Dieng 2023, "The Vendi Score", definition 3.1; the kernel is that of Martins et al. 2009.
    """
    known = ~divergence.isnan().flatten(-2).any(dim=-1)
    kernel = 1 - as_float64(divergence.nan_to_num(0.0)) / math.log(2)
    share = torch.linalg.eigvalsh(kernel / kernel.shape[-1]).clamp_min(0)
    number: Tensor = torch.special.entr(share / share.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()
    return number.to(divergence).masked_fill(~known, torch.nan)


def placed(divergence: Float[Tensor, "head head"]) -> tuple[Float[Tensor, "head 2"], float]:
    """Places heads as points in the plane at distances close to √JS, and returns the share of the spread that the plane
    shows.

    Classical scaling: the two largest eigenvalues of B = −½ C JS C, C = 1 − 1/n. Each axis points so that its largest
    coordinate is positive. Where all heads attend alike, every point is at 0 and the share is 1.

    >>> points, share = placed(torch.tensor([[0.0, 0.25, 1.0], [0.25, 0.0, 0.25], [1.0, 0.25, 0.0]]))
    >>> (points[0] - points[2]).norm(), share
    (tensor(1.), 1.0)

    Source: Torgerson 1952; Gower 1966.
    """
    number = len(divergence)
    precise = as_float64(divergence)
    centre = torch.eye(number, dtype=precise.dtype, device=precise.device) - 1 / number
    values, axes = torch.linalg.eigh(-centre @ precise @ centre / 2)
    values, axes = values.flip(0).clamp_min(0), axes.flip(1)
    if float(values.sum()) <= 1e-12:
        return divergence.new_zeros(number, 2), 1.0
    points = torch.nn.functional.pad(axes[:, :2] * values[:2].sqrt(), (0, max(0, 2 - number)))
    furthest = points.gather(0, points.abs().argmax(dim=0, keepdim=True))
    return (points * torch.where(furthest < 0, -1.0, 1.0)).to(divergence), float(values[:2].sum() / values.sum())
