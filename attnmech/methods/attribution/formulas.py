"""Formulas of attribution patching (docs/formulas.md#attribution)."""

from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.stats import hypergeom  # type: ignore[import-untyped]
from torch import Tensor

from ...maths.float64 import as_float64
from ...maths.intervals import LEVEL

METHODS: Final = {
    "gradient": "first-order estimate",
    "integrated": "estimate from integrated gradients",
    "relp": "estimate by relevance patching",
}
"""The estimates, by name: from the gradient of the corrupted run, its mean on the line between the two runs' inputs, or
the coefficients of relevance propagation."""


def first_order(
    change: Float[Tensor, "text position *node d"], gradient: Float[Tensor, "text position *node d"]
) -> Float[Tensor, " text *node"]:
    """Σ over positions of (u' − u) · ∂m/∂u: the change of a metric m, to first order, when u becomes u'.

    >>> import torch
    >>> first_order(torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]), torch.tensor([[[2.0, 0.5], [9.0, 1.0]]])).tolist()
    [6.0]
    """
    return (as_float64(change) * as_float64(gradient)).sum(dim=-1).sum(dim=1)


def midpoints(steps: int) -> list[float]:
    """The midpoints of `steps` equal parts of the line from 0 to 1.

    >>> midpoints(2)
    [0.25, 0.75]
    """
    return [(step + 0.5) / steps for step in range(steps)]


def count_interval(marked: int, drawn: int, total: int, level: float = LEVEL) -> tuple[int, int]:
    """The exact interval of the number of marked items among `total`, from the `marked` ones in a simple random sample
    of `drawn` items.

    It holds the numbers D for which neither P[X ≥ marked] nor P[X ≤ marked] is below (1 − level) / 2. X is the number
    of marked items in the sample if D of all items are marked (hypergeometric).

    >>> count_interval(0, 20, 250), count_interval(2, 20, 250), count_interval(3, 10, 10)
    ((0, 40), (4, 77), (3, 3))
    """
    possible = np.arange(marked, total - drawn + marked + 1)
    tail = (1 - level) / 2
    at_least = hypergeom.sf(marked - 1, total, possible, drawn)
    at_most = hypergeom.cdf(marked, total, possible, drawn)
    inside = possible[(at_least >= tail) & (at_most >= tail)]
    return int(inside[0]), int(inside[-1])
