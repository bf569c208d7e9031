"""Checks selections of heads, positions, keys and spans, and brings them into one order."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..basics.arguments import dense, integer, pairs_of, shown
from ..errors import InputError
from .values import Values

Head: TypeAlias = tuple[int, int]  # (layer, head)

Heads: TypeAlias = str | Sequence[Head]  # a list of (layer, head), or "all"

Positions: TypeAlias = str | Sequence[int]
"""Rows: "last", or a list of positions, as in `Batch.at`: 0 is the first token of each text, -1 its last."""

Keys: TypeAlias = str | Sequence[int] | Tensor
"""Keys: "first" (the first token of each text), "special" (the tokenizer's special tokens), positions (as in
`Batch.at`), or a mask `[batch key]` over the columns of a batch, padding included."""

CheckedKeys: TypeAlias = tuple[int, ...] | Literal["first", "special"] | Values  # checked `Keys`; masks are in `Values`

Span: TypeAlias = tuple[int, int]  # (start, end): positions from `start` to `end` − 1


def checked_heads(heads: Any) -> tuple[Head, ...] | Literal["all"]:
    """Heads sorted, without duplicates."""
    if isinstance(heads, str) and heads == "all":
        return "all"
    pairs = pairs_of("heads", heads, '"all" or a list of (layer, head)')
    if not pairs:
        raise InputError("`heads` must name at least one head; got an empty list.")
    return tuple(sorted(pairs))


def checked_numbers(name: str, numbers: Any) -> tuple[int, ...]:
    """Non-negative whole numbers, sorted and without duplicates."""
    try:
        whole = {integer(number) for number in numbers}
        if not whole or min(whole) < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(f"`{name}` must be a list of whole numbers, 0 or more; got {shown(numbers)}.") from None
    return tuple(sorted(whole))


def checked_positions(positions: Any) -> tuple[int, ...] | None:
    """Positions sorted, without duplicates: those counted from the start, then those from the end."""
    if positions is None:
        return None
    if isinstance(positions, str) and positions == "last":
        return (-1,)
    return _in_texts(positions, '`positions` must be "last" or a list of')


def _in_texts(positions: Any, wanted: str) -> tuple[int, ...]:
    try:
        whole = {integer(position) for position in positions}
        if not whole:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"{wanted} whole numbers, negative ones from the end of each text; got {shown(positions)}."
        ) from None
    return tuple(sorted(whole, key=lambda position: (position < 0, position)))


def checked_span(name: str, span: Any) -> Span:
    """(start, end) of at least one token."""
    try:
        start, end = span
        whole = integer(start), integer(end)
        if not 0 <= whole[0] < whole[1]:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"`{name}` must be (start, end), token positions with 0 ≤ start < end; got {shown(span)}."
        ) from None
    return whole


def checked_keys(keys: Any) -> CheckedKeys:
    """Keys sorted, without duplicates; a mask becomes `Values`."""
    if isinstance(keys, Values):
        return keys
    if isinstance(keys, torch.Tensor):
        if keys.dtype != torch.bool or keys.ndim != 2:
            raise InputError(f"a tensor of `keys` must be a mask [batch key]; got {keys.dtype} {list(keys.shape)}.")
        dense("a mask of keys", keys)
        return Values({0: keys}, f"a mask of {int(keys.sum())} keys in {len(keys)} texts")
    if isinstance(keys, str) and keys in ("first", "special"):
        return keys  # type: ignore[return-value]
    if keys is None or isinstance(keys, str):
        raise InputError(f'`keys` must be "first", "special", positions, or a mask [batch key]; got {shown(keys)}.')
    return _in_texts(keys, "`keys` must be a list of")


def keys_shown(keys: CheckedKeys) -> str:
    """Keys in a sentence."""
    if isinstance(keys, tuple):
        return f"keys {listed_numbers(keys)}"
    return {"first": "the first token", "special": "special tokens"}.get(str(keys), str(keys))


def span_shown(span: Span) -> str:
    """A span in a sentence."""
    start, end = span
    return f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"


def listed_numbers(numbers: tuple[int, ...]) -> str:
    """Numbers in a sentence."""
    return ", ".join(map(str, numbers))
