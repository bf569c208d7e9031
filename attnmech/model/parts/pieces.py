"""Reads a tokenizer's pieces as text; byte-level pieces become the characters that their bytes form."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any, Final

_AS_THEMSELVES: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _AS_THEMSELVES)

_BYTE_OF: Final = {
    # ByT5 writes every byte as the character with that number. GPT-2 does so for printable bytes, and numbers the other
    # bytes from U+0100 on (`bytes_to_unicode`).
    **{chr(byte): byte for byte in range(256)},
    **{chr(0x100 + number): byte for number, byte in enumerate(_OTHERS)},
}

_FALLBACK: Final = {f"<0x{byte:02X}>": byte for byte in range(256)}


def read_piece(tokenizer: Any, token: int) -> str | bytes:
    """The text of a token; its bytes if they begin or end within a character.

    >>> from attnmech.demo.tokenizer import build_tokenizer
    >>> tokenizer = build_tokenizer()
    >>> [read_piece(tokenizer, token) for token in tokenizer.encode(" owls é", add_special_tokens=False)]
    [' owls', ' ', b'\\xc3', b'\\xa9']

    Args:
        tokenizer: any tokenizer of transformers. A token's name is taken to spell bytes if the token decodes to the
            text of these bytes, or if the vocabulary has all of `<0x00>` to `<0xFF>`.
        token: a token id; an id that the tokenizer does not have is read as `<id>`.

    """
    raw = tokenizer.convert_ids_to_tokens(token)
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
            # The name of an added token is its text, even if it decodes as though it were bytes.
            if token not in tokenizer.added_tokens_decoder:
                return held
    return str(raw) if decoded == "" or "\ufffd" in decoded else decoded


def texts_of_pieces(pieces: Sequence[str | bytes]) -> tuple[str, ...]:
    r"""The text of each piece; where a piece holds part of a character, the character with the numbers of its bytes.

    >>> texts_of_pieces(["a", b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"\xff"])
    ('a', '你[1,2/3]', '你[3/3]好[1/3]', '好[2,3/3]', '\\xff')

    Bytes that form no character are written as `\xff`.
    """
    runs: Iterable[tuple[bool, Any]] = groupby(pieces, key=lambda piece: isinstance(piece, bytes))
    return tuple(chain.from_iterable(_characters(list(run)) if is_bytes else run for is_bytes, run in runs))


def _bytes_of(tokenizer: Any, raw: str, decoded: str) -> bytes | None:
    """The bytes that a token's name spells in a byte-level tokenizer, or in SentencePiece's fallback to bytes."""
    if raw in _FALLBACK:
        ids = tokenizer.convert_tokens_to_ids(list(_FALLBACK))
        if len(set(ids) - {None, tokenizer.unk_token_id}) == len(_FALLBACK):
            return bytes([_FALLBACK[raw]])
    if not set(raw) <= _BYTE_OF.keys():
        return None
    held = bytes(_BYTE_OF[character] for character in raw)
    return held if decoded in (held.decode(errors="replace"), held.decode(errors="ignore")) else None


def _characters(run: list[bytes]) -> list[str]:
    """The characters of consecutive pieces; a character is listed in every piece that holds some of its bytes."""
    owners = [number for number, piece in enumerate(run) for _ in piece]
    labels, start = [""] * len(run), 0
    for character in b"".join(run).decode(errors="surrogateescape"):
        held = character.encode(errors="surrogateescape")
        label = held.decode(errors="backslashreplace")
        for number, places in groupby(range(len(held)), key=lambda place: owners[start + place]):
            mine = [str(place + 1) for place in places]
            labels[number] += label if len(mine) == len(held) else f"{label}[{','.join(mine)}/{len(held)}]"
        start += len(held)
    return labels
