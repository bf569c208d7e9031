"""Retries documents on which a worker ended: first all together, then in ever smaller parts.

The first time, the worker may have ended for another reason, so all its documents are assigned again, in the same
batches. From the second time on, one of the documents is suspected: each part is assigned separately, and a part that
ends a worker is divided further. A document is left out when it makes up a part by itself and four workers have ended
on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .worker import Piece

_AGAIN: Final = 2
"""Documents are divided once this many workers have ended on them."""

_MOST: Final = 4
"""A document is left out once this many workers have ended on it, the last of them on that document alone."""

_PARTS: Final = 16
"""The maximum number of parts into which documents are divided."""


@dataclass(frozen=True)
class Outcome:
    """The decision on documents on which workers have ended."""

    again: list[list[Piece]]
    """The documents to assign again, each part separately."""
    left_out: tuple[int, ...] = ()
    """The number of the document to leave out."""


def divided(pieces: Sequence[Piece], deaths: int) -> Outcome:
    """Decides, after `deaths` workers have ended on documents, which parts to assign again and what to leave out."""
    count = sum(len(piece.documents) for piece in pieces)
    if count == 1 and deaths >= _MOST:
        return Outcome([], tuple(pieces[0].documents.tolist()))
    if count == 1 or deaths < _AGAIN:
        return Outcome([list(pieces)])
    size = -(-count // _PARTS)
    places = [(piece, torch.split(torch.arange(len(piece.documents)), size)) for piece in pieces]
    return Outcome([[piece.part(some)] for piece, parts in places for some in parts])
