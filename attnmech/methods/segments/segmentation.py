"""Splits texts into segments: sentences, lines, whole documents, or spans of tokens.

Each token of a text belongs to exactly one segment; segments are counted from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from ...basics.arguments import integer, listed, option, shown
from ...batch import Batch
from ...errors import InputError
from ...runs.token_types import TOKEN_TYPES, type_of

KINDS: Final = ("sentence", "line", "document")
"""The kinds of segments that are read from the text itself."""

Segments: TypeAlias = str | Sequence[Any]
"""One of `KINDS`, or spans: a list of (start, end); for several texts, a list of these lists."""

_CLOSING: Final = "\"')]}»”’」』）"
"""Marks that belong to the sentence that ends before them."""


@dataclass(frozen=True)
class Segmented:
    """The segments of the texts of a batch."""

    of_token: Int[Tensor, "batch position"]
    """The segment of each token; −1 at padding."""
    starts: tuple[tuple[int, ...], ...]
    """Each segment's start, counted from the text's first token, followed by the text's length."""

    @classmethod
    def of(cls, batch: Batch, segments: Segments) -> "Segmented":
        """Segments the texts of a batch; raises `InputError` for spans that do not cover each token of a text once."""
        lengths = [int(length) for length in batch.lengths]
        for number, length in enumerate(lengths):
            if length == 0:
                raise InputError(f"text {number} has no tokens, so it has no segments.")
        if isinstance(segments, str):
            starts = tuple(_starts(batch, row, option("segments", segments, KINDS)) for row in range(len(lengths)))
        else:
            starts = tuple(
                _checked(spans, length, number)
                for number, (spans, length) in enumerate(zip(_by_text(segments, len(lengths)), lengths, strict=True))
            )
        of_token = torch.full_like(batch.ids, -1, dtype=torch.long)
        for row, own in enumerate(starts):
            sizes = torch.tensor(own).diff().to(batch.ids.device)
            numbers = torch.arange(len(sizes), device=batch.ids.device)
            of_token[row, batch.mask[row]] = numbers.repeat_interleave(sizes)
        return cls(of_token, starts)

    @property
    def most(self) -> int:
        """The largest number of segments in a text."""
        return max(len(own) - 1 for own in self.starts)


def _starts(batch: Batch, row: int, kind: str) -> tuple[int, ...]:
    """Returns the starts of one text's segments, followed by the text's length."""
    real = batch.mask[row].cpu()
    tokens = [token for token, counts in zip(batch.tokens[row], real.tolist(), strict=True) if counts]
    if kind == "document":
        return (0, len(tokens))
    if batch.texts_of is None:
        raise InputError(f"segments={kind!r} needs a text; pass spans, such as [(0, 5), (5, 12)].")
    special = batch.is_special[row].cpu()[real].tolist()
    # Special tokens belong to the segment beside them, so no segment consists of special tokens alone.
    ordinary = [place for place, other in enumerate(special) if not other]
    words = [tokens[place] for place in ordinary]
    after = _sentence_starts(words) if kind == "sentence" else _line_starts(words)
    return (0, *(ordinary[place] for place in after), len(tokens))


def _sentence_starts(tokens: Sequence[str]) -> list[int]:
    """Finds the starts of all sentences but the first: after a mark that ends a sentence, and its closing marks.

    If the tokenizer keeps spaces, a full stop ends a sentence only before a space, so 3.14 does not end one.
    """
    spaced = any(token[:1].isspace() for token in tokens)
    starts, ended, wide = [], False, False
    for place, token in enumerate(tokens):
        mark = token.strip().rstrip(_CLOSING)
        ends = bool(mark) and TOKEN_TYPES[type_of(mark)] == "sentence end"
        closes = not token[:1].isspace() and not token.strip(_CLOSING)
        if ended and not ends and not closes and token.strip():
            if not spaced or wide or token[:1].isspace() or tokens[place - 1][-1:].isspace():
                starts.append(place)
            ended = False
        if ends:
            ended, wide = True, mark[-1] in "。！？"
    return starts


def _line_starts(tokens: Sequence[str]) -> list[int]:
    """Finds the starts of all lines but the first: the first token after a line break that is not blank."""
    starts, ended = [], False
    for place, token in enumerate(tokens):
        if ended and token.strip():
            starts.append(place)
            ended = False
        ended = ended or "\n" in token
    return starts


def _by_text(segments: Sequence[Any], texts: int) -> list[Any]:
    """The spans of each text."""
    wanted = f"one of {', '.join(KINDS)}, or a list of (start, end) token positions"
    spans = listed("segments", segments, wanted)
    if not spans:
        raise InputError(f"`segments` must be {wanted}; got an empty list.")
    if texts == 1 and _is_span(spans[0]):
        return [spans]
    if len(spans) != texts or any(_is_span(span) for span in spans):
        raise InputError(
            f"`segments` must hold a list of (start, end) for each of the {texts} texts; got {shown(segments)}."
        )
    return spans


def _is_span(span: Any) -> bool:
    try:
        start, end = span
        integer(start), integer(end)
    except (TypeError, ValueError):
        return False
    return True


def _checked(spans: Any, length: int, text: int) -> tuple[int, ...]:
    """Returns the starts of spans; raises `InputError` unless they cover each token of a text once."""
    whole = listed("segments", spans, "a list of (start, end)")
    last = 0
    starts = []
    for number, span in enumerate(whole):
        if not _is_span(span):
            raise InputError(f"segment {number} of text {text} must be (start, end), two integers; got {shown(span)}.")
        start, end = (integer(end_point) for end_point in span)
        named = f"segment {number} of text {text}, ({start}, {end}),"
        if not 0 <= start < end <= length:
            raise InputError(f"{named} must satisfy 0 ≤ start < end ≤ {length}, the number of tokens of the text.")
        if start < last:
            raise InputError(
                f"{named} overlaps the previous segment, which ends at {last}; each token must belong to one segment."
            )
        if start > last:
            raise InputError(
                f"{_tokens(last, start)} of text {text} belong to no segment; start {named[:-1]} at {last}."
            )
        starts.append(start)
        last = end
    if last < length:
        raise InputError(f"{_tokens(last, length)} of text {text} belong to no segment; the text has {length} tokens.")
    return (*starts, length)


def _tokens(start: int, end: int) -> str:
    return f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"
