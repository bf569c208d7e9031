"""Formulas of faithfulness (docs/formulas.md#faithfulness)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def trapezoid(shares: Sequence[float]) -> Float[Tensor, " circuit"]:
    """The weights of the trapezoid rule: Σ w_k f_k approximates ∫ f from the smallest to the largest share.

    >>> trapezoid([0.0, 0.5, 1.0]).tolist()
    [0.25, 0.5, 0.25]
    """
    x = torch.tensor(shares, dtype=torch.float64)
    half = (x[1:] - x[:-1]) / 2
    weights = torch.zeros_like(x)
    weights[:-1] += half
    weights[1:] += half
    return weights
