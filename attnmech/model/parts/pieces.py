"""Reads a tokenizer's pieces as text; byte-level pieces become the characters that their bytes form.

A label shows what a token is (`你[1/3]`, `##ing`). It is for readers; what code needs to know about the text of a token
comes from `characters_of` and `text_of`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Final, TypeAlias

from jaxtyping import Int
from torch import Tensor

from ...batch import Batch

Pieces: TypeAlias = Sequence[str | bytes]
"""What each token holds of a text: characters, or bytes where it begins or ends within a character."""

_AS_THEMSELVES: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _AS_THEMSELVES)

_BYTE_OF: Final = {
    # ByT5 writes every byte as the character with that number. GPT-2 does so for printable bytes, and numbers the other
    # bytes from U+0100 on (`bytes_to_unicode`).
    **{chr(byte): byte for byte in range(256)},
    **{chr(0x100 + number): byte for number, byte in enumerate(_OTHERS)},
}

_FALLBACK: Final = {f"<0x{byte:02X}>": byte for byte in range(256)}

RARE: Final = ("\U00013000", "\ua66e", "\U000120b1", "\u2e3f")
"""Letters, and a mark, that hardly any vocabulary has; no two end with the same byte of UTF-8."""


@dataclass(frozen=True)
class Tokenized:
    """The tokens of a text."""

    ids: Int[Tensor, " position"]
    unknown: tuple[str, ...] = ()  # the characters of each token that the vocabulary lacks, in order, if they are known


def read_piece(tokenizer: Any, token: int) -> str | bytes:
    """The text of a token; its bytes if they begin or end within a character.

    >>> import attnmech as am
    >>> tokenizer = am.load().tokenizer
    >>> [read_piece(tokenizer, token) for token in tokenizer.encode(" owls é", add_special_tokens=False)]
    [' owls', ' ', b'\\xc3', b'\\xa9']

    Args:
        tokenizer: any tokenizer of transformers. A token's name is taken to spell bytes if the token decodes to the
            text of these bytes, or if the vocabulary has all of `<0x00>` to `<0xFF>`.
        token: a token id; an id that the tokenizer does not have is read as `<id>`.

    """
    raw = _name_of(tokenizer, token)
    if raw is None:
        return f"<{token}>"
    if "▁" in raw:
        return str(raw).replace("▁", " ")
    decoded = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    held = _bytes_of(tokenizer, raw, decoded)
    if held is not None:
        try:
            return held.decode()
        except UnicodeDecodeError:
            # The name of another added token is its text, even if it decodes as though it were bytes.
            if raw in _FALLBACK or token not in tokenizer.added_tokens_decoder:
                return held
    return str(raw) if decoded == "" or "\ufffd" in decoded else decoded


def _name_of(tokenizer: Any, token: int) -> str | None:
    """The tokenizer's name of a token; None for an id that it does not have, at which SentencePiece raises."""
    try:
        name: str | None = tokenizer.convert_ids_to_tokens(token)
    except (IndexError, KeyError):
        return None
    return name


def piece_of_text(tokenizer: Any, token: int, piece: str | bytes) -> str | bytes:
    """What a token holds of the text: the piece that `read_piece` returned, without signs that the tokenizer adds.

    These are the `##` before the rest of a word (WordPiece) and the `@@` after its beginning. An id that the tokenizer
    does not have holds nothing.
    """
    if _name_of(tokenizer, token) is None:
        return ""
    if isinstance(piece, bytes) or piece in ("##", "@@"):
        return piece
    if piece.startswith("##") and _joins(tokenizer, "a", "##b"):
        return piece[2:]
    return piece[:-2] if piece.endswith("@@") and _joins(tokenizer, "a@@", "b") else piece


def _joins(tokenizer: Any, one: str, other: str) -> bool:
    """Whether a tokenizer writes two pieces as one word, without the signs of its own."""
    return str(tokenizer.convert_tokens_to_string([one, other])).strip() == "ab"


def unknown_id(tokenizer: Any) -> int | None:
    """The id of all characters that the vocabulary lacks ("[UNK]"); None if the tokenizer has tokens for everything.

    A tokenizer that names an `unk_token` need not use it: GPT-2's has a token for every byte.
    """
    if tokenizer is None:
        return None
    try:
        ids = [tokenizer(character, add_special_tokens=False)["input_ids"] for character in RARE]
    except Exception:  # tokenizers' own: a vocabulary of words without a token for others
        return None
    ends = Counter(int(row[-1]) for row in ids if row).most_common(1)
    # A tokenizer that drops such characters may still put a space before them.
    return next((end for end, count in ends if count > 1 and str(read_piece(tokenizer, end)).strip()), None)


def unknown_texts(tokenizer: Any, unknown: int | None, text: str, argument: str = "text") -> tuple[str, ...]:
    """The characters of each token of a text that the vocabulary lacks, in order."""
    if getattr(tokenizer, "is_fast", False):
        read = tokenizer(**{argument: text}, add_special_tokens=False, return_offsets_mapping=True)
        ids, pieces = read["input_ids"], [text[start:end] for start, end in read["offset_mapping"]]
    else:
        names = tokenizer.tokenize(text)
        ids, pieces = tokenizer.convert_tokens_to_ids(names), [name.replace("▁", " ") for name in names]
    return tuple(piece for token, piece in zip(ids, pieces, strict=True) if token == unknown)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that stand for no text.

    They are those that the tokenizer names, and those that only its vocabulary marks as special, such as Llama 3's
    headers of messages. The token of unknown characters and SentencePiece's bytes stand for text.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {token for token, entry in added.items() if entry.special and entry.content not in _FALLBACK}
    return frozenset({*getattr(tokenizer, "all_special_ids", ()), *marked} - {unknown_id(tokenizer)})


def texts_of_pieces(pieces: Pieces) -> tuple[str, ...]:
    r"""The label of each piece; where a piece holds part of a character, the character with the numbers of its bytes.

    >>> texts_of_pieces(["a", b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"\xff"])
    ('a', '你[1,2/3]', '你[3/3]好[1/3]', '好[2,3/3]', '\\xff')

    Bytes that form no character are written as `\xff`.
    """
    return _written(pieces, _label)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    return texts_of_pieces([read_piece(tokenizer, token) for token in ids])


def characters_of(batch: Batch) -> tuple[tuple[str, ...], ...]:
    """The characters of each token; a character that is divided among tokens belongs to all of them.

    A byte of no character, and a position that is not a token of text, have none.
    """
    return batch.tokens if batch.pieces is None else tuple(_written(row, _whole) for row in batch.pieces)


def text_of(batch: Batch) -> tuple[tuple[str, ...], ...]:
    """The text of each token; joined, the texts of consecutive tokens are the text that they stand for.

    A character that is divided among tokens is part of the text of the first of them.
    """
    return batch.tokens if batch.pieces is None else tuple(_written(row, _once) for row in batch.pieces)


def _bytes_of(tokenizer: Any, raw: str, decoded: str) -> bytes | None:
    """The bytes that a token's name spells in a byte-level tokenizer, or in SentencePiece's fallback to bytes."""
    if raw in _FALLBACK:
        ids = tokenizer.convert_tokens_to_ids(list(_FALLBACK))
        if len(set(ids) - {None, tokenizer.unk_token_id}) == len(_FALLBACK):
            return bytes([_FALLBACK[raw]])
    raw = raw.removesuffix("</w>") or raw  # the end of a word in CLIP's tokenizer
    if not set(raw) <= _BYTE_OF.keys():
        return None
    held = bytes(_BYTE_OF[character] for character in raw)
    return held if decoded in (held.decode(errors="replace"), held.decode(errors="ignore")) else None


_Part: TypeAlias = tuple[bytes, list[int]]  # the bytes of a character, and the places of those that a piece holds


def _written(pieces: Pieces, write: Callable[[bytes, list[int]], str]) -> tuple[str, ...]:
    """Each piece as text; `write` writes the parts of characters that pieces of bytes hold."""
    runs: Iterable[tuple[bool, Any]] = groupby(pieces, key=lambda piece: isinstance(piece, bytes))
    return tuple(
        chain.from_iterable(
            ["".join(write(*part) for part in parts) for parts in _parts(list(run))] if is_bytes else run
            for is_bytes, run in runs
        )
    )


def _label(character: bytes, places: list[int]) -> str:
    label, count = character.decode(errors="backslashreplace"), len(character)
    return label if len(places) == count else f"{label}[{','.join(str(place + 1) for place in places)}/{count}]"


def _whole(character: bytes, places: list[int]) -> str:
    return character.decode(errors="ignore")


def _once(character: bytes, places: list[int]) -> str:
    return character.decode(errors="backslashreplace") if places[0] == 0 else ""


def _parts(run: list[bytes]) -> list[list[_Part]]:
    """The characters of consecutive pieces; a character is listed in every piece that holds some of its bytes."""
    owners = [number for number, piece in enumerate(run) for _ in piece]
    parts: list[list[_Part]] = [[] for _ in run]
    start = 0
    for character in b"".join(run).decode(errors="surrogateescape"):
        held = character.encode(errors="surrogateescape")
        for number, places in groupby(range(len(held)), key=lambda place: owners[start + place]):
            parts[number].append((held, list(places)))
        start += len(held)
    return parts
