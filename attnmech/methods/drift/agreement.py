"""Tests whether two series over layers agree more than shuffled layers would."""

import math
from itertools import permutations
from typing import Final

import numpy as np
from jaxtyping import Float
from numpy.random import Philox
from scipy.stats import rankdata  # type: ignore[import-untyped]

_ALL_ORDERS: Final = 7
"""The largest number of layers for which all orders are tried."""
_ORDERS: Final = 9999
"""The number of random orders for more layers."""
_LEAST: Final = 3
_ROUNDING: Final = 1e-12


def rank_agreement(one: Float[np.ndarray, " layer"], other: Float[np.ndarray, " layer"]) -> tuple[float, float]:
    """Computes Spearman's ρ of two series, and the share of orders with at least this |ρ|; NaN for a constant series.

    All orders of up to seven layers are tried; for more layers, 9,999 random orders and the true one.

    >>> rho, p = rank_agreement(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.0, 1.0, 3.0, 2.0]))
    >>> round(rho, 3), round(p, 3)
    (0.8, 0.333)
    """
    if len(one) < _LEAST or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.nan, math.nan
    ranks = [_standard(rankdata(series)) for series in (one, other)]
    if not all(np.isfinite(series).all() for series in ranks):
        return math.nan, math.nan
    orders = _orders(len(one))
    rho = float(ranks[0] @ ranks[1])
    as_large = np.abs(ranks[0][orders] @ ranks[1]) >= abs(rho) - _ROUNDING
    exact = len(one) <= _ALL_ORDERS
    share = as_large.mean() if exact else (as_large.sum() + 1) / (len(orders) + 1)
    return rho, float(share)


def _orders(count: int) -> np.ndarray:
    if count <= _ALL_ORDERS:
        return np.array(list(permutations(range(count))))
    # Raw bits of Philox-4×64 give the same orders in every version of numpy.
    return Philox(key=[0, count]).random_raw(_ORDERS * count).reshape(_ORDERS, count).argsort(axis=1, kind="stable")


def _standard(ranks: np.ndarray) -> np.ndarray:
    centred = ranks - ranks.mean()
    size = float(np.linalg.norm(centred))
    return centred / size if size > 0 else np.full(len(ranks), np.nan)
