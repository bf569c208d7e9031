"""Finds the tokens of a string where it stands in a text, which may differ from those of the string alone.

A tokenizer may put a space before every text, or join the string with the characters before it.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Final

from ..errors import InputError
from ..model.run.hooked import HookedModel

_TAIL: Final = 8
"""The number of tokens that stand for a text whose tokens do not spell it."""


def following(tokenizer: Any, before: Sequence[int] | None, string: str) -> list[int] | None:
    """The tokens of a string after the tokens `before`; None if the tokenizer splits the two otherwise.

    Without `before`, the string follows a letter.
    """
    text, known = ("a", _ids(tokenizer, "a")) if before is None else _spelled(tokenizer, list(before))
    whole = _ids(tokenizer, text + string)
    return whole[len(known) :] if whole[: len(known)] == known else None


def ending(tokenizer: Any, ids: Sequence[int], string: str) -> list[int] | None:
    """The last tokens of `ids`, which spell a string; None if the text does not end with it.

    The first of them may begin with spaces that precede the string. Raises `InputError` if it begins with other
    characters.
    """
    text, known = _spelled(tokenizer, list(ids))
    if not text.endswith(string):
        return None
    before = _ids(tokenizer, text.removesuffix(string))
    end = known[_common(before, known) :]
    if tokenizer.decode(end, clean_up_tokenization_spaces=False).strip() != string.strip():
        raise InputError(
            f"the tokenizer joins the beginning of {string!r} with the characters before it; give an answer that "
            "begins with a token, such as one with its leading space, or the ids of the answer."
        )
    return end


def divided(model: HookedModel, before: str, after: str, bos: bool | None) -> tuple[list[int], int]:
    """The tokens of a text up to the first that holds a character of `after`, which follows `before`; and this token.

    The token may begin with the last characters of `before`: a space, or a quotation mark.
    """
    tokenizer = model.tokenizer
    short, whole = (model.encode(text, bos=bos).ids[0].tolist() for text in (before, before + after))
    length = _common(short, whole)
    rest = tokenizer.decode(short[length:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for place in range(length, len(whole)):
        if not rest.startswith(tokenizer.decode(whole[length : place + 1], clean_up_tokenization_spaces=False)):
            return whole[:place], whole[place]
    raise InputError(f"the tokenizer has no token for {after!r} after {before[-20:]!r}; give another answer.")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _spelled(tokenizer: Any, ids: list[int]) -> tuple[str, list[int]]:
    """A text, and its tokens: as many of the last of `ids` as the tokenizer makes from the text that they spell."""
    for start in _starts(tokenizer, ids):
        text = tokenizer.decode(ids[start:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _ids(tokenizer, text) == ids[start:]:
            return text, ids[start:]
    return "a", _ids(tokenizer, "a")


def _starts(tokenizer: Any, ids: list[int]) -> Iterator[int]:
    """Where the text may begin: after special tokens, since some tokenizers treat the characters after them alone."""
    special = set(tokenizer.all_special_ids)
    yield sum(1 for _ in takewhile(special.__contains__, ids))
    yield len(ids) - sum(1 for _ in takewhile(lambda token: token not in special, reversed(ids)))
    yield from (0, max(0, len(ids) - _TAIL), max(0, len(ids) - 1))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
