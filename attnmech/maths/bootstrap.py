"""Intervals of a statistic over documents, by the Poisson bootstrap.

Each replicate b counts document n with a weight w_nb ~ Poisson(1), independent of all others, where the ordinary
bootstrap draws N documents out of N: for sums over documents the two agree as N grows (Chamandy et al., "Estimating
Uncertainty for Massive Data Streams", 2012), and here no one need know N, nor hold the documents together.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.random import Philox
from torch import Tensor

from ..arguments import finite_number

_P_AT_MOST = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(20)])
"""P(w ≤ k) of Poisson(1); what is left out of it lies below the rounding of 1."""


def poisson_weights(
    documents: Int[Tensor, " document"], replicates: int, seed: int = 0
) -> Float[Tensor, "document replicate"]:
    """How often each replicate counts each document: independent numbers of Poisson(1), in float64.

    A weight is a function of (seed, document number, replicate) alone, so that shards and orders of the same
    documents agree, and so do runs with more replicates. The random bits are Philox-4×64's under the key (seed,
    document), a counter-based generator whose output is fixed by its paper (Salmon et al. 2011), and 53 of each 64
    become a weight by the inverse of the distribution function: no version of numpy changes them, as one may change
    what `Generator.poisson` draws.

    >>> poisson_weights(torch.tensor([7, 4, 7]), 6).int().tolist()
    [[1, 2, 0, 1, 3, 2], [1, 1, 1, 1, 0, 0], [1, 2, 0, 1, 3, 2]]
    """
    raw = [Philox(key=[seed, number]).random_raw(replicates) for number in documents.tolist()]
    uniform = (np.array(raw, dtype=np.uint64).reshape(len(raw), replicates) >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(np.searchsorted(_P_AT_MOST, uniform, side="right").astype(np.float64))


def interval(
    estimates: Float[Tensor, "*axes replicate"], level: float = 0.95
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """The percentile interval: the quantiles (1 − level)/2 and (1 + level)/2 over replicates, linear in between.

    Replicates that are not finite, since no row counts in them, are left out; where fewer than two are left, the
    interval is NaN. It says how the estimate would vary with other documents: of one document it says nothing.
    """
    level = finite_number("level", level, above=0.0, below=1.0)
    finite = torch.isfinite(estimates)
    last = finite.sum(dim=-1, keepdim=True) - 1
    ordered = torch.where(finite, estimates, torch.inf).sort(dim=-1).values
    low, high = (_quantile(ordered, last, share) for share in ((1 - level) / 2, (1 + level) / 2))
    return low, high


def _quantile(
    ordered: Float[Tensor, "*axes replicate"], last: Int[Tensor, "*axes 1"], share: float
) -> Float[Tensor, "*axes"]:
    """A quantile of the values up to the place `last`."""
    place = share * last.clamp(min=0).double()
    below = place.long()
    above = torch.minimum(below + 1, last.clamp(min=0))
    low, high = ordered.gather(-1, below), ordered.gather(-1, above)
    found = torch.lerp(low, high, (place - below).to(low.dtype))
    return torch.where(last >= 1, found, torch.nan).squeeze(-1)
