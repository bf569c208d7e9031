"""Sorts rows into classes: the first token of each text, other special tokens, and all others."""

from typing import Final

import torch
from jaxtyping import Bool
from torch import Tensor

from ..batch import Batch

ROW_CLASSES: Final = ("ordinary", "special", "first")
"""The classes of row: the first token of a text, another special token, or any other token."""


def row_classes(batch: Batch) -> Bool[Tensor, "batch class position"]:
    """For each class in `ROW_CLASSES`, True at the real tokens that belong to it; padding belongs to none."""
    known, first = batch.is_special, batch.first
    if batch.texts_of is None and batch.ids.shape[1] == 1:
        # A module that pools has a single query, which is not the beginning of a text.
        first = torch.zeros_like(first)
    return torch.stack([~known & ~first, known & ~first, first], dim=1) & batch.mask[:, None]
