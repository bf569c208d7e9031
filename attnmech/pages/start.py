"""Chooses the head and the row that a page shows first."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32

from ..draw.numbers import ScoreNumbers
from ..methods.head_types.formulas import targets
from ..methods.head_types.head_types import RESTING, HeadTypes
from ..runs.effects import HeadEffects


def example_of(types: HeadTypes | None, layers: Sequence[int]) -> tuple[int, int, str] | None:
    """Returns the layer and head that belong most clearly to a type, and that type; None if the layers shown have no
    typed head.
    """
    if types is None or types.example is None or types.example[0] not in layers:
        return None
    kinds = types.types_of(*types.example)
    # Heads that rest on one token are shown first only if there is no other head.
    return *types.example, next((kind for kind in kinds if kind not in RESTING), kinds[0])


def start_of(types: HeadTypes | None, effects: HeadEffects | None, view: ScoreNumbers) -> tuple[int, int, int] | None:
    """Returns the layer, head and row that a page shows first.

    The head belongs most clearly to a type, or its ablation changes the loss most. The row has the head's highest
    attention to the key that its type attends to, or to another token.
    """
    example = example_of(types, view.layers)
    if example is not None:
        layer, head, kind = view.layers.index(example[0]), *example[1:]
        pattern = view.pattern[layer, head]
        on_target = pattern * _targets(view.tokens, kind, causal=not np.triu(view.pattern, 1).any())
        on_target[0] = 0
        row = int(on_target.sum(axis=1).argmax()) if on_target.max() > 0 else _looking_elsewhere(pattern)
        return view.layers[layer], head, row
    if effects is None:
        return None
    effect = effects.effect[list(view.layers)].abs().nan_to_num()
    layer, head = divmod(int(effect.argmax()), effect.shape[1])
    return view.layers[layer], head, _looking_elsewhere(view.pattern[layer, head])


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
