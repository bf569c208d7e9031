"""Splits a text into words, and finds the tokens of each word."""

import re
from collections.abc import Sequence
from unicodedata import category

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.arguments import shown
from ..batch import Batch
from ..errors import InputError
from ..model.run.hooked import HookedModel


def texts_by_id(model: HookedModel, ids: Int[Tensor, "*places"], stack: str) -> dict[int, str]:
    """The texts of tokens by id, as positions of a stack have them; −1 is no token."""
    known = sorted(set(ids.flatten().tolist()) - {-1})
    return dict(zip(known, model.position_texts(known, stack), strict=True)) if known else {}


def split_words(text: str) -> tuple[str, ...]:
    """The words and punctuation marks of a text, each with the space before it; joined, they give the text.

    A word is a run of letters and digits, with apostrophes and hyphens inside.

    >>> split_words("Anna's old boat-house (made by Tom).")
    ("Anna's", ' old', ' boat-house', ' (', 'made', ' by', ' Tom', ')', '.')
    """
    kinds = "".join(_kind(character) for character in text)
    ends = [match.end() for match in re.finditer(r"s*(?:w+(?:jw+)*|[^s])", kinds)]
    if not ends:
        return ()
    return tuple(text[start:end] for start, end in zip([0, *ends[:-1]], [*ends[:-1], len(text)], strict=True))


def _kind(character: str) -> str:
    if character.isspace():
        return "s"
    if character in "'’-":
        return "j"
    return "w" if category(character)[0] in "LMN" else "x"


def bare(word: str) -> str:
    """A word in lower case without spaces around it; empty for a punctuation mark.

    >>> bare(" Anna"), bare(" (")
    ('anna', '')
    """
    text = word.strip().casefold()
    return text if any(_kind(character) == "w" for character in text) else ""


def words_of(model: HookedModel, batch: Batch, words: Sequence[str]) -> Float[Tensor, "word position"]:
    """1 where a token belongs to a word of the batch's only text; 0 for tokens that the tokenizer adds.

    The joined words must be the text. Raises `InputError` for a word without tokens, and for a tokenizer that does not
    give the offsets of its tokens.
    """
    member = members_of(model, batch, words)
    for number, word in enumerate(words):
        if not member[number].any():
            raise InputError(f"word {number}, {word!r}, has no token in {shown(''.join(words))}.")
    return member


def members_of(model: HookedModel, batch: Batch, words: Sequence[str]) -> Float[Tensor, "word position"]:
    """As `words_of`, but words may lack tokens of their own, since one token may cover several words.

    A token belongs to the word that holds its first character other than a space.
    """
    text = "".join(words)
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError("labels by words need a model with a fast tokenizer; give labels by tokens, with a string.")
    assert model.tokenizer is not None
    for special in (True, False):
        read = model.tokenizer(text, return_offsets_mapping=True, add_special_tokens=special)
        if read["input_ids"] == batch.ids[0].tolist():
            break
    else:
        raise InputError(
            f"the tokenizer does not split {shown(text)} into the tokens that the model read; label tokens instead."
        )
    ends = torch.tensor([len(word) for word in words]).cumsum(dim=0)
    member = torch.zeros(len(words), batch.ids.shape[1], dtype=torch.float32)
    for place, (start, end) in enumerate(read["offset_mapping"]):
        inner = start + len(text[start:end]) - len(text[start:end].lstrip())
        if end > start and inner < len(text):
            member[int(torch.searchsorted(ends, min(inner, end - 1), right=True)), place] = 1
    return member
