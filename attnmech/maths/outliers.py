"""Robust scores of heads among all heads, and the score that the most extreme head reaches by chance."""

import math
from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_NUMBERS: Final = 2**22  # the approximate number of random values drawn for a critical score


def spread_of(values: Float[Tensor, " head"]) -> tuple[float, float]:
    """Returns the median and the robust standard deviation, 1.4826 · median |x − median|; NaN values are left out.

    If more than half of the values are equal, that deviation is 0, and 1.2533 · mean |x − median| replaces it.

    >>> spread_of(torch.tensor([1.0, 2.0, 3.0, 4.0, 90.0]))
    (3.0, 1.4826)

    Source: Iglewicz & Hoaglin 1993, "How to Detect and Handle Outliers".
    """
    known = values[~values.isnan()].double()
    if not len(known):
        return math.nan, math.nan
    middle = known.quantile(0.5)
    off = (known - middle).abs()
    wide = 1.4826 * float(off.quantile(0.5)) or 1.2533 * float(off.mean())
    return float(middle), wide


def robust_scores(values: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
    """Returns (x − median) / robust standard deviation; 0 if all values are equal, NaN where a value is NaN.

    >>> robust_scores(torch.tensor([1.0, 2.0, 3.0, 4.0, 90.0])).round(decimals=1)
    tensor([-1.3000, -0.7000,  0.0000,  0.7000, 58.7000])
    """
    middle, wide = spread_of(values.flatten())
    return (values - middle) / wide if wide > 0 else values - middle


@lru_cache
def critical_score(heads: int, statistics: int, level: float = 0.95) -> float:
    """Returns the score that the largest |robust score| of `heads` normal values exceeds with probability (1 − level)
    / statistics.

    The score is simulated with a fixed seed and so includes the noise in the median and spread of few heads: with 32
    heads and one statistic it is above 3.2, the value for exact normal scores.

    >>> round(critical_score(32, 1), 1), critical_score(8, 1) > critical_score(500, 1)
    (3.8, True)
    """
    if heads < 3:
        return math.inf
    generator = torch.Generator().manual_seed(0)
    draws = min(20_000, max(2_000, _NUMBERS // heads))
    values = torch.randn(draws, heads, generator=generator, dtype=torch.float64)
    off = (values - values.quantile(0.5, dim=1, keepdim=True)).abs()
    largest = off.amax(dim=1) / (1.4826 * off.quantile(0.5, dim=1))
    return float(largest.quantile(1 - (1 - level) / statistics))
