"""Claims types of heads by what they write: copy suppression, and successors.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...maths.intervals import LEVEL, exact_interval

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


def claimed(shares: Mapping[str, Shares], layers: Sequence[int]) -> pd.DataFrame:
    """One row per claim, the highest share first. Intervals hold for all heads and types together.

    >>> import torch
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
