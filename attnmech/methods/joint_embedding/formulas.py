"""Maps queries and keys to points in one space in which a query lies near the keys that it attends to.

Formulas: docs/formulas.md#joint-embedding.

Scaled, after AttentionViz (Yeh et al. 2023, arXiv 2305.03210): q ← c q, k ← k / c, then all keys move so that their
mean equals the queries' mean. Neither step changes softmax(q·k); both change the distance between a query and a key.

Exact: two more coordinates make the squared distance a constant of the query minus twice the score.

The plain correlation of distance and dot product says little: ‖c q − k / c‖² = c²‖q‖² + ‖k‖²/c² − 2 q·k, so for one
query it approaches −1 as c → ∞, whatever the vectors are. The weights w = (τ − distance)² over the pairs nearer than τ
make the correlation measure near pairs.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ...maths.ranks import rank_correlation

NEAR: Final = 20.0  # τ is this percentile of the distances


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


def distances_at(
    c: float,
    query_squares: Float64[Tensor, " pair"],
    key_squares: Float64[Tensor, " pair"],
    products: Float64[Tensor, " pair"],
) -> Float64[Tensor, " pair"]:
    """Returns the distances of pairs for any c: ‖c q − k / c‖² = c²‖q‖² + ‖k‖²/c² − 2 q·k.

    With a shift, q and k are queries and keys minus their means, because moving the keys' mean to the queries' mean
    removes both means from the difference.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> distances_at(2.0, one, 4 * one, 2 * one)
    tensor([1.], dtype=torch.float64)
    """
    squared = query_squares.numpy() * c**2
    squared += key_squares.numpy() / c**2
    squared -= 2 * products.numpy()
    return torch.from_numpy(np.sqrt(np.maximum(squared, 0, out=squared), out=squared))


GRID: Final = 25  # the number of values of c that are tried, from 1/8 to 8 times the closed form, in steps of 2^(1/4)


def scale_of_norms(q: Float[Tensor, "query d"], k: Float[Tensor, "key d"]) -> float:
    """Returns c = √(median ‖k‖ / median ‖q‖), which gives queries and keys the same median norm; 1 if a median is 0.

    >>> scale_of_norms(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 20.0]]))
    2.0
    """
    queries, keys = (float(vectors.double().norm(dim=-1).quantile(0.5)) for vectors in (q, k))
    return math.sqrt(keys / queries) if queries > 0 and keys > 0 else 1.0


def scale_grid(middle: float) -> Float64[Tensor, " c"]:
    """Returns the values of c to try, around the closed form of `scale_of_norms`.

    >>> grid = scale_grid(2.0)
    >>> grid[0].item(), grid[12].item(), grid[-1].item()
    (0.25, 2.0, 16.0)
    """
    return middle * torch.exp2(torch.linspace(-3, 3, GRID, dtype=torch.float64))


@dataclass(frozen=True)
class ScaleAndShift:
    """q ↦ c q, k ↦ k / c + offset."""

    c: float
    offset: Float[Tensor, " d"]

    @classmethod
    def of(cls, q: Float[Tensor, "query d"], k: Float[Tensor, "key d"], c: float, *, shift: bool) -> "ScaleAndShift":
        """Builds the map with scale c; with `shift`, the keys' mean also moves to the queries' mean.

        >>> q, k = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> ScaleAndShift.of(q, k, 2.0, shift=True).keys(k)
        tensor([[4., 0.]])
        """
        offset = c * q.mean(dim=0) - k.mean(dim=0) / c if shift else torch.zeros_like(k[0])
        return cls(c, offset)

    def queries(self, q: Float[Tensor, "*places d"]) -> Float[Tensor, "*places d"]:
        """c q."""
        return q * self.c

    def keys(self, k: Float[Tensor, "*places d"]) -> Float[Tensor, "*places d"]:
        """k / c + offset."""
        return k / self.c + self.offset.to(k)


@dataclass(frozen=True)
class Sphere:
    """q ↦ [scale · q, slope, 0], k ↦ [k, p, √(M² − ‖k‖² − p²)]: the keys lie on a sphere of radius M.

    ‖q̃ − k̃‖² = ‖q̃‖² + M² − 2 (scale · q·k + slope · p): for one query, distance falls exactly as the score rises. p is
    the key's position in the score, position term / slope, counted from the first key of its text.
    """

    scale: float
    slope: float
    radius_squared: float

    @classmethod
    def of(cls, k: Float[Tensor, "key d"], p: Float[Tensor, " key"], scale: float, slope: float) -> "Sphere":
        """Builds the sphere with M² = max_j(‖k_j‖² + p_j²)."""
        return cls(scale, slope, float((k.double().square().sum(dim=-1) + p.double().square()).max()))

    def queries(self, q: Float[Tensor, "*places d"]) -> Float64[Tensor, "*places d_and_two"]:
        """Returns the queries' points, in float64 because M may be much larger than differences of scores.

        >>> Sphere(0.5, -1.0, 25.0).queries(torch.tensor([[2.0]]))
        tensor([[ 1., -1.,  0.]], dtype=torch.float64)
        """
        wide = q.double()
        slope, zero = torch.full_like(wide[..., :1], self.slope), torch.zeros_like(wide[..., :1])
        return torch.cat((self.scale * wide, slope, zero), dim=-1)

    def keys(self, k: Float[Tensor, "*places d"], p: Float[Tensor, "*places"]) -> Float64[Tensor, "*places d_and_two"]:
        """Returns the keys' points, in float64.

        >>> Sphere(0.5, -1.0, 25.0).keys(torch.tensor([[0.0]]), torch.tensor([3.0]))
        tensor([[0., 3., 4.]], dtype=torch.float64)
        """
        wide, place = k.double(), p.double()[..., None]
        rest = self.radius_squared - wide.square().sum(dim=-1, keepdim=True) - place.square()
        return torch.cat((wide, place, rest.clamp_min(0).sqrt()), dim=-1)


def spread_ratio(chosen: Float[Tensor, "chosen d"], others: Float[Tensor, "point d"]) -> float:
    """Divides the mean distance between two of the chosen points by the mean distance between any two points.

    Below 1, the chosen points lie closer together than random points. NaN if either set has fewer than two points, or
    if all points coincide.

    >>> points = torch.tensor([[0.0], [1.0], [10.0]])
    >>> round(spread_ratio(points[:2], points), 3)
    0.15
    """
    if len(chosen) < 2 or len(others) < 2:
        return math.nan
    whole = float(torch.pdist(others.double()).mean())
    return float(torch.pdist(chosen.double()).mean()) / whole if whole > 0 else math.nan
