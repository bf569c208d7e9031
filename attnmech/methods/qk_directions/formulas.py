"""Splits W_Q R W_Kᵀ of a head into its singular directions.

Formulas: docs/formulas.md#query-key-directions.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_RANK: Final = 1e-6
"""Singular values below this share of the largest are rounding."""


@dataclass(frozen=True)
class Directions:
    """The singular directions of W_Q R W_Kᵀ = Σ_r σ_r u_r v_rᵀ of some heads, and how they split queries.

    A query q is a sum of parts: q = Σ_r (q·a_r) c_r, where q·a_r = √σ_r (x·u_r) for q = x W_Q. A direction beyond the
    rank of W_Q R W_Kᵀ has a_r = c_r = 0.
    """

    singular: Float[Tensor, "*heads direction"]
    query: Float[Tensor, "*heads direction d_model"]
    """u_r, of length 1: what queries read."""
    key: Float[Tensor, "*heads direction d_model"]
    """v_r, of length 1: what keys read at the distance of R."""
    a: Float[Tensor, "*heads d_head direction"]
    c: Float[Tensor, "*heads d_head direction"]


def directions_of(
    W_Q: Float[Tensor, "*heads d_model d_head"], W_K: Float[Tensor, "*heads d_model d_head"]
) -> Directions:
    """Computes the singular directions of W_Q W_Kᵀ, the largest first; the largest entry of each u_r is positive.

    With W_Q = Q_1 T_1, W_K = Q_2 T_2 and T_1 T_2ᵀ = U Σ Vᵀ: u = Q_1 U, v = Q_2 V, a = T_2ᵀ V Σ^(−1/2) and
    c = T_1ᵀ U Σ^(−1/2).

    >>> W_Q, W_K = torch.randn(2, 5, 3, dtype=torch.float64)
    >>> split = directions_of(W_Q, W_K)
    >>> torch.allclose((split.query.mT * split.singular) @ split.key, W_Q @ W_K.T)
    True
    >>> torch.allclose(split.a @ split.c.T, torch.eye(3, dtype=torch.float64))
    True
    """
    first, second = torch.linalg.qr(W_Q), torch.linalg.qr(W_K)
    split = torch.linalg.svd(first.R @ second.R.mT)
    u, v = first.Q @ split.U, second.Q @ split.Vh.mT
    sign = u.gather(-2, u.abs().argmax(dim=-2, keepdim=True)).sign()
    root = split.S.rsqrt().where(_RANK * split.S[..., :1] < split.S, 0.0)[..., None, :]
    return Directions(
        singular=split.S,
        query=(u * sign).mT,
        key=(v * sign).mT,
        a=second.R.mT @ (split.Vh.mT * sign) * root,
        c=first.R.mT @ (split.U * sign) * root,
    )
