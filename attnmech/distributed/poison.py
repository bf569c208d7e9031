"""Retries documents on which a worker ended: all together, then in ever smaller parts.

The first time, the worker may have ended for another reason, so all are given again, in the same batches. From the
second time on, one of the documents is suspected: each part is given alone, and the part that ends a worker is divided
further. A document that is left alone and has seen four workers end is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .worker import Piece

_AGAIN: Final = 2
"""The number of workers that must end on documents before these are divided."""

_MOST: Final = 4
"""The number of workers that must end on a document, the last of them on that document alone, before it is skipped."""

_PARTS: Final = 16
"""Into how many parts documents are divided, at most."""


@dataclass(frozen=True)
class Outcome:
    """The decision on documents on which workers have ended."""

    again: list[list[Piece]]
    """The documents to assign again, each part separately."""
    left_out: tuple[int, ...] = ()
    """The number of the document to leave out."""


def divided(pieces: Sequence[Piece], deaths: int) -> Outcome:
    """The same documents again, in parts, or none, after `deaths` workers have ended on them."""
    count = sum(len(piece.documents) for piece in pieces)
    if count == 1 and deaths >= _MOST:
        return Outcome([], tuple(pieces[0].documents.tolist()))
    if count == 1 or deaths < _AGAIN:
        return Outcome([list(pieces)])
    size = -(-count // _PARTS)
    places = [(piece, torch.split(torch.arange(len(piece.documents)), size)) for piece in pieces]
    return Outcome([[piece.part(some)] for piece, parts in places for some in parts])
