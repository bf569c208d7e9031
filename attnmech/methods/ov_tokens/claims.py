"""Claims types of heads by what they write: copy suppression, and successors.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.text import plotly_text, quoted, signed, visible_token
from ...maths.intervals import LEVEL, exact_interval


@dataclass(frozen=True)
class Pair:
    """A token that a head reads, and a token whose logit it then raises or lowers most."""

    layer: int
    head: int
    kind: str
    """"raised" or "lowered"."""
    rank: int
    """The place of the pair among those of its kind, from 0."""
    read: str
    written: str
    logit: float
    """What the head adds to the logit of `written` if it attends only to `read`, above the mean over the vocabulary."""
    read_id: int
    written_id: int

    def __str__(self) -> str:
        return f"{quoted(self.read)} → {quoted(self.written)} {signed(self.logit, '.2f')}"


def pairs_chart(pairs: Sequence[Sequence[Sequence[Pair]]], kind: str) -> Chart:
    """The pairs of each layer and head, with columns for the token read, the token written, and the logit."""
    columns: dict[str, Callable[[Pair], str]] = {
        "reads": lambda pair: plotly_text(visible_token(pair.read)),
        kind: lambda pair: plotly_text(visible_token(pair.written)),
        "logit": lambda pair: signed(pair.logit, ".2f"),
    }
    figure = Figure()
    figure.add_table(header={"values": list(columns)}, cells={"values": [[] for _ in columns]})
    figure.update_layout(height=60 + 26 * len(pairs[0][0]))
    slots = []
    for place, column in enumerate(columns.values()):
        texts = [[[column(pair) for pair in of_head] for of_head in of_layer] for of_layer in pairs]
        slots.append(Slot(f"data.0.cells.values.{place}", ByChoice(np.array(texts, dtype=object), ("layer", "head"))))
    return Chart(figure, tuple(slots))


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
