"""Finds the tokens of a string where it stands in a text, which may differ from those of the string alone.

A tokenizer may put a space before every text, or join the string with the characters before it.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, Final

from ..errors import InputError
from ..model.inputs.encoders import text_encoder
from ..model.parts.pieces import RARE, Tokenized
from ..model.run.hooked import HookedModel

_TAIL: Final = 8  # the number of tokens that stand for a text whose tokens do not spell it


def following(model: HookedModel, before: Tokenized | None, string: str) -> list[int] | None:
    """The tokens of a string after the tokens `before`; None if the tokenizer splits the two otherwise.

    Without `before`, the string follows a letter.
    """
    for text, known in _spelled(model, before):
        whole = _ids(model.tokenizer, text + string)
        if whole[: len(known)] == known and len(whole) > len(known):
            return whole[len(known) :]
    return None


def ending(model: HookedModel, prompt: Tokenized, string: str) -> list[int] | None:
    """The last tokens of a text, which spell a string; None if the text does not end with it.

    The first of them may begin with spaces that precede the string. Raises `InputError` if it begins with other
    characters.
    """
    tokenizer: Any = model.tokenizer
    text, known = _spelled(model, prompt)[0]
    if not text.endswith(string):
        return None
    end = known[_common(_ids(tokenizer, text.removesuffix(string)), known) :]
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
            require_known(model, whole[place : place + 1], after)
            return whole[:place], whole[place]
    raise InputError(f"the tokenizer has no token for {after!r} after {before[-20:]!r}; give another answer.")


def require_known(model: HookedModel, ids: Sequence[int], answer: str) -> None:
    """Raises `InputError` for an answer with characters that the vocabulary lacks."""
    encoder = text_encoder(model.encoder)
    if encoder is not None and encoder.unknown in ids:
        raise InputError(f"the model's vocabulary lacks characters of {answer!r}; give another answer.")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _spelled(model: HookedModel, prompt: Tokenized | None) -> list[tuple[str, list[int]]]:
    """Texts that end as a prompt does, each with its tokens: as many of the prompt's last tokens as the tokenizer makes
    from the text that they spell. "a" for no prompt, and for one whose tokens spell no text.
    """
    tokenizer, encoder = model.tokenizer, text_encoder(model.encoder)
    special, unknown = (frozenset[int](), None) if encoder is None else (encoder.special, encoder.unknown)
    if prompt is None:
        return [("a", _ids(tokenizer, "a"))]
    for start in _starts(special, prompt.ids.tolist()):
        rest = replace(prompt, ids=prompt.ids[start:])
        ids = rest.ids.tolist()
        texts = [text for text in _texts(tokenizer, rest, unknown) if _ids(tokenizer, text) == ids]
        if texts:
            return [(text, ids) for text in texts]
    return [("a", _ids(tokenizer, "a"))]


def _texts(tokenizer: Any, prompt: Tokenized, unknown: int | None) -> list[str]:
    """What tokens may spell, with the characters that the vocabulary lacks or, if unknown, with some that it lacks."""
    ids = prompt.ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    count = 0 if unknown is None else ids.count(unknown)
    if not count:
        return [text]
    name = tokenizer.convert_ids_to_tokens(unknown)
    parts = text.split(name)
    lacking = prompt.unknown[-count:]
    texts = [lacking] if len(lacking) == count and set(lacking) != {name} else [[rare] * count for rare in RARE]
    return ["".join(chain(*zip(parts, [*own, ""], strict=True))) for own in texts if len(parts) == count + 1]


def _starts(special: Container[int], ids: list[int]) -> Iterator[int]:
    """Where the text may begin: after special tokens, since some tokenizers treat the characters after them alone."""
    yield sum(1 for _ in takewhile(special.__contains__, ids))
    yield len(ids) - sum(1 for _ in takewhile(lambda token: token not in special, reversed(ids)))
    yield from (0, max(0, len(ids) - _TAIL), max(0, len(ids) - 1))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
