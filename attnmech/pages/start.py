"""Chooses the head and the row that a page shows first."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32

from ..draw.ledger import widest_row
from ..draw.numbers import ScoreNumbers
from ..methods.head_types.formulas import targets
from ..methods.head_types.head_types import RESTING, HeadTypes


def example_of(types: HeadTypes | None, layers: Sequence[int]) -> tuple[int, int, str] | None:
    """Returns the layer and head that belong most clearly to a type, and that type; None if the layers shown have no
    typed head.
    """
    if types is None or types.example is None or types.example[0] not in layers:
        return None
    kinds = types.types_of(*types.example)
    # Heads that rest on one token are shown first only if there is no other head.
    return *types.example, next((kind for kind in kinds if kind not in RESTING), kinds[0])


def row_of(types: Sequence[str], view: ScoreNumbers, layer: int, head: int) -> int:
    """The row of a head that a page shows first.

    For a head with a type, take the rows whose attention to keys of that type exceeds uniform attention at least half
    as much as in any row; this is the one whose scores differ most. Types of heads that rest on one token come last.
    For a head without a type, it is the row with the highest attention to another token.
    """
    scores = view.scores[view.layers.index(layer), head]
    pattern = view.pattern[view.layers.index(layer), head]
    uniform = (pattern > 0) / np.maximum(1, (pattern > 0).sum(axis=1, keepdims=True))
    for kind in sorted(types, key=lambda kind: kind in RESTING):
        target = _targets(view.tokens, kind, causal=not np.triu(view.pattern, 1).any())
        above = ((pattern - uniform) * target)[1:].sum(axis=1)
        if above.size and above.max() > 0:
            return widest_row(scores, pattern, [1 + int(row) for row in np.flatnonzero(above >= above.max() / 2)])
    return _looking_elsewhere(pattern)


def _looking_elsewhere(pattern: Float32[np.ndarray, "query key"]) -> int:
    """Returns the row with the highest attention to a token that is neither the first nor the row's own."""
    elsewhere = pattern.copy()
    elsewhere[:, 0] = 0
    np.fill_diagonal(elsewhere, 0)
    return int(elsewhere.max(axis=1).argmax())


def _targets(tokens: Sequence[str], kind: str, *, causal: bool) -> Bool[np.ndarray, "query key"]:
    """The keys to which a type of head attends, in a text that is shown from its first token on."""
    length = len(tokens)
    _, ids = np.unique(np.array(tokens, dtype=object).astype(str), return_inverse=True)
    first = torch.arange(length)[None] == 0
    by_kind = targets(torch.from_numpy(ids)[None], first, {}, range(length), length, causal=causal)
    return by_kind[kind][0].numpy() if kind in by_kind else np.zeros((length, length), dtype=bool)
