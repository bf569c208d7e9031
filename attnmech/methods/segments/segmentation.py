"""Splits texts into segments: sentences, lines, whole documents, runs of one kind, or spans of tokens.

Each token of a text belongs to exactly one segment; segments are counted from 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, TypeAlias
from unicodedata import east_asian_width

import regex
import torch
from jaxtyping import Int
from torch import Tensor

from ...basics.arguments import integer, listed, option, shown
from ...batch import Batch
from ...errors import InputError
from ...model.parts.pieces import characters_of, text_of
from ...runs.token_types import ENDS

KINDS: Final = ("sentence", "line", "document", "kind")  # the kinds of segments that are read from the text itself
Segments: TypeAlias = str | Sequence[Any]  # one of `KINDS`, or spans (start, end); for several texts, a list of lists
_MARK: Final = regex.compile(f"[{ENDS}]")

_SENTENCE: Final = regex.compile(
    rf"[{ENDS}](?:[{ENDS}\p{{Pe}}\p{{Pf}}\"']|\p{{Pi}}(?![\p{{L}}\p{{N}}])"
    rf"|\s+(?:[{ENDS}]|[\p{{Pe}}\p{{Pf}}](?![\p{{L}}\p{{N}}])))*"
)
"""The marks that end a sentence, and the quotation marks and brackets that belong to it.

“ and « close a quotation in some languages and open one in others: they open one before a letter.
"""

_LINE: Final = regex.compile(r"[\n\r\v\f\x85\u2028\u2029]+")


@dataclass(frozen=True)
class Segmented:
    """The segments of the texts of a batch."""

    of_token: Int[Tensor, "batch position"]  # the segment of each token; −1 at padding
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


def real_texts(batch: Batch) -> tuple[tuple[str, ...], ...]:
    """The text of each token, without padding."""
    return tuple(tuple(compress(row, real)) for row, real in zip(text_of(batch), batch.mask.tolist(), strict=True))


def _starts(batch: Batch, row: int, kind: str) -> tuple[int, ...]:
    """Returns the starts of one text's segments, followed by the text's length."""
    one = batch.alone(row)
    length = one.ids.shape[1]
    if kind == "document":
        return (0, length)
    if kind == "kind":
        kinds = one.kinds()
        return (0, *(place for place in range(1, length) if kinds[place] != kinds[place - 1]), length)
    if batch.texts_of is None:
        raise InputError(f"segments={kind!r} needs a text; pass spans, such as [(0, 5), (5, 12)].")
    # Special tokens belong to the segment beside them, so no segment consists of special tokens alone.
    ordinary = (~one.is_special[0]).nonzero()[:, 0].tolist()
    texts, characters = ([written(one)[0][place] for place in ordinary] for written in (text_of, characters_of))
    after = _beginnings(texts, characters, _SENTENCE if kind == "sentence" else _LINE)
    return (0, *(ordinary[place] for place in after), length)


def _beginnings(texts: Sequence[str], characters: Sequence[str], end: "regex.Pattern[str]") -> list[int]:
    """The tokens that begin a segment, but the first: a token belongs to the segment of its first visible character."""
    text = "".join(texts)
    ends = [match.end() for match in end.finditer(text) if end is _LINE or _ends_sentence(match, text)]
    begun: list[int] = []
    at, passed = 0, len(ends)
    for place, (own, held) in enumerate(zip(texts, characters, strict=True)):
        if held.strip():
            begin = at - max(0, len(held) - len(own))
            reached = bisect_right(ends, begin + len(held) - len(held.lstrip()))
            if reached > passed:
                begun.append(place)
            passed = reached
        at += len(own)
    return begun


def _ends_sentence(match: "regex.Match[str]", text: str) -> bool:
    """Whether these marks end a sentence.

    Marks within numbers, names and addresses do not: a mark between digits, and one of ASCII's (or "…") before a
    character without a space. A text without any space comes from a tokenizer that drops them, and a script without
    spaces needs none.
    """
    mark = _MARK.findall(match.group())[-1]
    before, after = text[: match.start()][-1:], text[match.end() :][:1]
    if not after.strip():
        return True
    if mark in ".\uff0e\u2024\ufe52" and before.isdigit() and after.isdigit():
        return False
    if mark.isascii() or mark == "…":
        return not any(map(str.isspace, text)) or (mark != "…" and east_asian_width(after) in "WF")
    return True


def _by_text(segments: Sequence[Any], texts: int) -> list[Any]:
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
