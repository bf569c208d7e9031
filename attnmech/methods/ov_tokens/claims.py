"""Claims types of heads by what they write: copy suppression, and successors.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import beta  # type: ignore[import-untyped]
from torch import Tensor

from ...maths.intervals import LEVEL

TYPES: Final = {"copy suppression": "suppressed", "successor": "successor"}
"""The types, with the statistic of each."""

LEAST_SHARE: Final = 0.5
"""A claim needs at least this share of tokens."""


class Shares(NamedTuple):
    """A share of tokens for each head."""

    share: Float[Tensor, "measured head"]
    tokens: int
    """The number of tokens that count as independent."""
    chance: float


def exact_interval(share: Tensor, tokens: int, error: float) -> tuple[Tensor, Tensor]:
    """Returns the exact interval (Clopper & Pearson 1934) for a share of independent tokens.

    A share that is not a whole number of tokens is rounded down for the low end, and up for the high end.

    >>> [round(float(end), 4) for end in exact_interval(torch.tensor(0.5), 10, 0.05)]
    [0.1871, 0.8129]
    """
    hits = share.double().numpy() * tokens
    fewest, most = torch.tensor(hits + 1e-9).floor().numpy(), torch.tensor(hits - 1e-9).ceil().numpy()
    low = torch.as_tensor(beta.ppf(error / 2, fewest, tokens - fewest + 1)).nan_to_num(0.0)
    high = torch.as_tensor(beta.ppf(1 - error / 2, most + 1, tokens - most)).nan_to_num(1.0)
    return low, high


def claimed(shares: Mapping[str, Shares], layers: Sequence[int]) -> pd.DataFrame:
    """One row per claim, the highest share first. Intervals hold for all heads and types together.

    >>> found = {"successor": Shares(torch.tensor([[0.3, 1.0]]), 20, 0.1)}
    >>> claimed(found, [3])[["layer", "head", "type", "score", "baseline"]].values.tolist()
    [[3, 1, 'successor', 1.0, 0.1]]
    """
    rows = []
    heads = sum(share.numel() for share, *_ in shares.values())
    for name, (share, tokens, chance) in shares.items():
        low, high = exact_interval(share, tokens, (1 - LEVEL) / heads)
        for place in map(tuple, ((low > chance) & (share >= LEAST_SHARE)).nonzero().tolist()):
            numbers = float(share[place]), chance, float(low[place]), float(high[place])
            rows.append((layers[place[0]], place[1], name, *numbers, tokens))
    return pd.DataFrame(rows, columns=_COLUMNS).sort_values("score", ascending=False, ignore_index=True, kind="stable")


_COLUMNS: Final = ["layer", "head", "type", "score", "baseline", "score_low", "score_high", "tokens"]
