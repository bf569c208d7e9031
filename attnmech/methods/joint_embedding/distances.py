"""Correlations of the distance between query and key with their dot product (docs/formulas.md#joint-embedding).

The plain correlation says little: ‖c q − k / c‖² = c²‖q‖² + ‖k‖²/c² − 2 q·k, so for one query it approaches −1 as c →
∞, whatever the vectors are. The weights w = (τ − distance)² over the pairs nearer than τ make the correlation measure
near pairs.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ...maths.ranks import rank_correlation

NEAR: Final = 20.0
"""τ is this percentile of the distances."""


def weighted_correlation(distance: Float[Tensor, " pair"], product: Float[Tensor, " pair"]) -> float:
    """Computes Pearson's correlation of distance and dot product over pairs nearer than τ, with weights (τ −
    distance)².

    NaN if fewer than three pairs are nearer than τ, or if these pairs do not vary.

    >>> distance = torch.arange(20.0)
    >>> round(weighted_correlation(distance, 3 - 2 * distance), 6)
    -1.0
    """
    if not len(distance):
        return math.nan
    # numpy, because torch's threads only wait for each other on many short vectors.
    wide = distance.double().numpy()
    tau = float(np.percentile(wide, NEAR))
    near = np.flatnonzero(wide < tau)
    if len(near) < 3:
        return math.nan
    x, y = wide[near], product.double().numpy()[near]
    # Rounding leaves a small variance where the true variance is 0.
    small = 1e-9 * max(float(x.max() * np.abs(y).max()), 1e-300)
    weight = (tau - x) ** 2
    weight /= weight.sum()
    x, y = x - weight @ x, y - weight @ y
    below = math.sqrt(float(weight @ x**2) * float(weight @ y**2))
    return float(weight @ (x * y)) / below if below > small else math.nan


def row_rank_correlation(
    distance: Float[Tensor, " pair"], product: Float[Tensor, " pair"], row: Int[Tensor, " pair"]
) -> float:
    """Returns the Spearman correlation furthest from −1 among rows (queries) of at least three keys; NaN if there are
    none.

    >>> row = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> round(row_rank_correlation(torch.tensor([1.0, 2, 3, 5, 4, 6]), torch.tensor([3.0, 2, 1, 2, 3, 1]), row), 6)
    -1.0
    """
    worst = math.nan
    counts = torch.unique_consecutive(row, return_counts=True)[1].tolist()
    for x, y in zip(torch.split(distance, counts), torch.split(product, counts), strict=True):
        of_row = rank_correlation(x, y) if len(x) > 2 else math.nan
        if math.isnan(worst) or of_row > worst:
            worst = of_row
    return worst


@dataclass(frozen=True)
class PairDistances:
    """The distances of pairs for any c: ‖c q − k / c‖² = c²‖q‖² + ‖k‖²/c² − 2 q·k.

    With a shift, q and k are queries and keys minus their means, because moving the keys' mean to the queries' mean
    removes both means from the difference.
    """

    query_squares: Float64[Tensor, " pair"]
    key_squares: Float64[Tensor, " pair"]
    products: Float64[Tensor, " pair"]

    def at(self, c: float) -> Float64[Tensor, " pair"]:
        """Returns the distances at one c.

        >>> one = torch.ones(1, dtype=torch.float64)
        >>> PairDistances(one, 4 * one, 2 * one).at(2.0)
        tensor([1.], dtype=torch.float64)
        """
        queries, keys, products = (values.numpy() for values in (self.query_squares, self.key_squares, self.products))
        squared = queries * c**2
        squared += keys / c**2
        squared -= 2 * products
        return torch.from_numpy(np.sqrt(np.maximum(squared, 0, out=squared), out=squared))

    def part(self, chosen: Int[Tensor, " part"]) -> "PairDistances":
        """Returns the distances of some of the pairs."""
        return PairDistances(self.query_squares[chosen], self.key_squares[chosen], self.products[chosen])
