"""Spearman's rank correlation, and Pearson's."""

import math

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata  # type: ignore[import-untyped]
from torch import Tensor


def rank_correlation(one: Float[Tensor, " pair"], other: Float[Tensor, " pair"]) -> float:
    """Computes Spearman's correlation, which is Pearson's of the ranks (mean ranks for ties); NaN if one does not vary.

    >>> import torch
    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 5.0, 4.0])), 6)
    -1.0
    """
    if len(one) < 2:
        return math.nan
    # numpy, because torch's threads only wait for each other on many short vectors.
    return _correlation(*(rankdata(values.double().numpy()) for values in (one, other)))


def plain_correlation(one: Float[Tensor, " pair"], other: Float[Tensor, " pair"]) -> float:
    """Computes Pearson's correlation; NaN if one does not vary.

    >>> import torch
    >>> round(plain_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 5.0, 1.0])), 6)
    -1.0
    """
    return _correlation(one.double().numpy(), other.double().numpy()) if len(one) > 1 else math.nan


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    below = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / below if below > 0 else math.nan
