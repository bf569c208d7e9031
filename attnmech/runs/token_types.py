"""Sorts tokens into types: words, numbers, marks, special tokens, pictures and sounds, and each text's first token."""

from functools import lru_cache
from typing import Final
from unicodedata import category, name

import regex
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..batch import Batch
from ..maths.sums_by_text import by_class
from ..model.parts.pieces import characters_of

TOKEN_TYPES: Final = (  # the types of key, in the order of the axis `type`
    "first token",
    "special",
    "sentence end",
    "comma",
    "other mark",
    "number",
    "word",
    "other",
    "media",
)

ENDS: Final = r"\p{Sentence_Terminal}\u2026\u037e\u0f0d\u0f0e"
"""The characters that end sentences, in a class of `regex`: Unicode's, …, the Greek question mark and Tibetan shads."""

_ENDS: Final = regex.compile(f"[{ENDS}]+")

_AROUND: Final = regex.compile(r"[\p{Ps}\p{Pe}\p{Pi}\p{Pf}\"'\s]+")
"""Quotation marks and brackets, which one token may hold together with another mark."""

_ATTACHED: Final = regex.compile(r"[\p{M}\p{Emoji_Modifier}\u200c\u200d\U000e0020-\U000e007f]+")
"""Characters that belong to the character before them: accents, vowel signs, parts of emoji, joiners."""


def token_types(batch: Batch) -> Int[Tensor, "batch position"]:
    """The index in `TOKEN_TYPES` of each token, by the characters of the text that it holds, whole or in part.

    A token of accents, vowel signs or joiners alone has the type of the token before it.
    """
    rows = []
    for ids, texts in zip(batch.ids.tolist(), characters_of(batch), strict=True):
        types: list[int] = []
        for token, text in zip(ids, texts, strict=True):
            if token in batch.kind_of:
                types.append(TOKEN_TYPES.index("media"))
            elif token in batch.special:
                types.append(TOKEN_TYPES.index("special"))
            elif types and TOKEN_TYPES[types[-1]] not in ("special", "media") and _ATTACHED.fullmatch(text):
                types.append(types[-1])
            else:
                types.append(type_of(text))
        rows.append(types)
    indices = torch.tensor(rows, device=batch.ids.device)
    return indices.scatter(1, batch.begins[:, None], TOKEN_TYPES.index("first token"))


@lru_cache(2**16)
def type_of(text: str) -> int:
    """The index in `TOKEN_TYPES` of the type of characters, at any position of a text.

    >>> [TOKEN_TYPES[type_of(text)] for text in (" ?!", "。”", " ٣", "😀")]
    ['sentence end', 'sentence end', 'number', 'other mark']
    """
    return TOKEN_TYPES.index(_name_of(text))


def _name_of(text: str) -> str:
    text = text.strip()
    kinds = {category(character)[0] for character in text}
    marks = _AROUND.sub("", _ATTACHED.sub("", text))
    if "L" in kinds or _ATTACHED.fullmatch(text):
        return "word"
    if "N" in kinds:
        return "number"
    if _ENDS.fullmatch(marks):
        return "sentence end"
    if marks and all(category(character) == "Po" and "COMMA" in name(character, "") for character in marks):
        return "comma"
    return "other mark" if text and not any(character.isspace() for character in text) else "other"


ROW_CLASSES: Final = ("ordinary", "special", "first")
"""The classes of row: the first token of a text, another special token, or any other token."""


def row_classes(batch: Batch) -> Bool[Tensor, "batch class position"]:
    """For each class in `ROW_CLASSES`, True at the real tokens that belong to it; padding belongs to none."""
    first = batch.first
    if batch.texts_of is None and batch.ids.shape[1] == 1:
        # A module that pools has a single query, which is not the beginning of a text.
        first = torch.zeros_like(first)
    return by_class(batch.mask, batch.is_special, first)
