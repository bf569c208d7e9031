"""Counts the copies of a text as one text, so that they are no further evidence (docs/formulas.md#intervals)."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor


def copies_of(contents: Iterable[Hashable]) -> tuple[int, ...]:
    """Returns, for each text, the number of the first text with the same content; empty if all contents differ.

    >>> copies_of(["a", "b", "a"]), copies_of(["a", "b"])
    ((0, 1, 0), ())
    """
    first: dict[Hashable, int] = {}
    numbers = tuple(first.setdefault(content, number) for number, content in enumerate(contents))
    return () if len(first) == len(numbers) else numbers


def distinct_of(copies: Sequence[int], texts: int) -> int:
    """Returns the number of distinct texts.

    >>> distinct_of((0, 1, 0), 3), distinct_of((), 3)
    (2, 3)
    """
    return len(set(copies)) if copies else texts


def over_copies(values: Tensor, copies: Sequence[int]) -> Tensor:
    """Sums values over the copies of each text, along the last axis.

    >>> over_copies(torch.tensor([1.0, 2.0, 4.0]), (0, 1, 0)), over_copies(torch.tensor([1.0, 2.0]), ())
    (tensor([5., 2.]), tensor([1., 2.]))
    """
    if not copies:
        return values
    places = {number: place for place, number in enumerate(dict.fromkeys(copies))}
    sums = values.new_zeros(*values.shape[:-1], len(places))
    return sums.index_add(-1, torch.tensor([places[number] for number in copies], device=values.device), values)
