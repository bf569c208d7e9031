"""Sorts tokens into types: words, numbers, marks, special tokens, and the first token of each text."""

from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from ..batch import Batch

TOKEN_TYPES: Final = ("first token", "special", "sentence end", "comma", "other mark", "number", "word", "other")
"""The types of key, in the order of the axis `type`."""


def token_types(batch: Batch) -> Int[Tensor, "batch position"]:
    """The index in `TOKEN_TYPES` of each token."""
    types = [
        [
            TOKEN_TYPES.index("special") if token in batch.special else type_of(text)
            for token, text in zip(*row, strict=True)
        ]
        for row in zip(batch.ids.tolist(), batch.tokens, strict=True)
    ]
    indices = torch.tensor(types, device=batch.ids.device)
    return indices.scatter(1, batch.begins[:, None], TOKEN_TYPES.index("first token"))


@lru_cache(2**16)
def type_of(token: str) -> int:
    """The index in `TOKEN_TYPES` of a token's text, at any position.

    >>> TOKEN_TYPES[type_of(" ?!")]
    'sentence end'
    """
    return TOKEN_TYPES.index(_name_of(token))


def _name_of(token: str) -> str:
    text = token.strip()
    if text and all(character in ".!?…。！？" for character in text):
        return "sentence end"
    if text in (",", "，", "、", "،"):
        return "comma"
    if any(character.isalpha() for character in text):
        return "word"
    if any(character.isnumeric() for character in text):
        return "number"
    return "other mark" if text and not any(character.isspace() for character in text) else "other"
