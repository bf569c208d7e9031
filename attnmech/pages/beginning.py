"""At which head and row a page begins."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32

from ..draw.numbers import ScoreNumbers
from ..methods.head_types.formulas import targets
from ..methods.head_types.head_types import RESTING, HeadTypes
from ..runs.effects import HeadEffects


def example_of(types: HeadTypes | None, layers: Sequence[int]) -> tuple[int, int, str] | None:
    """The layer and head that are most clearly of a type, and the type; None where no layer shown has one."""
    if types is None or types.example is None or types.example[0] not in layers:
        return None
    kinds = types.types_of(*types.example)
    # What a head rests on is a place to start at only if there is no other.
    return *types.example, next((kind for kind in kinds if kind not in RESTING), kinds[0])


def start_of(types: HeadTypes | None, effects: HeadEffects | None, view: ScoreNumbers) -> tuple[int, int, int] | None:
    """The layer, head and row that a page shows first.

    The head is that which is most clearly of a type, or without which the loss changes most; the row that in which it
    looks hardest at what such a head looks for, or at another token.
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
    """The row that looks hardest at a token that is neither the first nor its own."""
    elsewhere = pattern.copy()
    elsewhere[:, 0] = 0
    np.fill_diagonal(elsewhere, 0)
    return int(elsewhere.max(axis=1).argmax())


def _targets(tokens: Sequence[str], kind: str, *, causal: bool) -> Bool[np.ndarray, "query key"]:
    """The keys that a head of some kind would look at, in a text whose first token begins it."""
    length = len(tokens)
    _, ids = np.unique(np.array(tokens, dtype=object).astype(str), return_inverse=True)
    first = torch.arange(length)[None] == 0
    by_kind = targets(torch.from_numpy(ids)[None], first, {}, range(length), length, causal=causal)
    return by_kind[kind][0].numpy() if kind in by_kind else np.zeros((length, length), dtype=bool)
