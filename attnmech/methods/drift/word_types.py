"""Separates function words, which a closed list defines, from content words."""

from collections.abc import Collection, Sequence
from typing import Final
from unicodedata import category

from jaxtyping import Int
from torch import Tensor

from ...basics.arguments import strings
from ...batch import Batch
from ...model.parts.pieces import characters_of
from ...runs.token_types import TOKEN_TYPES, token_types

_WORDS: Final = """
a an the this that these those
i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself
we us our ours ourselves they them their theirs themselves one oneself
who whom whose which what whoever whatever
be am is are was were been being have has had having do does did doing
can could may might must shall should will would ought
and or but nor yet so if because although though while whereas unless until since whether than as
about above across after against along among around at before behind below beneath beside between beyond by despite
down during except for from in inside into like near of off on onto out outside over past per through throughout to
toward towards under up upon via with within without
all any both each either every few less many more most much neither no none not other several some such
here there when where why how then also too very just only
"""

FUNCTION_WORDS: Final = frozenset(_WORDS.split())
"""English articles, pronouns, auxiliaries, conjunctions, prepositions, quantifiers and pro-adverbs: a closed list."""

WORD_TYPES: Final = tuple(
    kind for name in TOKEN_TYPES for kind in (("function word", "content word") if name == "word" else (name,))
)
"""The types of token: `TOKEN_TYPES`, with words divided into two kinds."""

ORDINARY: Final = tuple(name for name in WORD_TYPES if name not in ("first token", "special"))
"""All types except the first token of a text and special tokens."""


def checked_words(words: object) -> frozenset[str]:
    """The function words to use, in lower case; `FUNCTION_WORDS` for None."""
    return FUNCTION_WORDS if words is None else frozenset(word.lower() for word in strings("function_words", words))


def word_types(batch: Batch, function_words: Collection[str] = FUNCTION_WORDS) -> Int[Tensor, "batch position"]:
    """The index in `WORD_TYPES` of each token.

    A token is a function word if it is a whole word of the list, ignoring case; a part of a longer word is a content
    word.
    """
    types = token_types(batch).cpu()
    for row, (labels, texts) in enumerate(zip(batch.tokens, characters_of(batch), strict=True)):
        parts = _parts(labels, texts)
        for place, text in enumerate(texts):
            name = TOKEN_TYPES[int(types[row, place])]
            if name == "word":
                whole = not parts[place] and text.strip().lower() in function_words
                name = "function word" if whole else "content word"
            types[row, place] = WORD_TYPES.index(name)
    return types.to(batch.ids.device)


def _parts(labels: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Whether each token is only part of a word: it continues the previous token, or the next token continues it.

    A tokenizer that keeps no spaces marks the parts of words: `##` before them, or `@@` after them.
    """
    spaced = any(text[:1].isspace() for text in texts[1:])
    continues = [not spaced and label.startswith("##") for label in labels]
    for place in range(1, len(texts)):
        if spaced:
            continues[place] = _in_word(texts[place][:1]) and _in_word(texts[place - 1][-1:])
        else:
            continues[place] = continues[place] or labels[place - 1].endswith("@@")
    return [one or other for one, other in zip(continues, [*continues[1:], False], strict=True)]


def _in_word(character: str) -> bool:
    return bool(character) and category(character)[0] in "LMN"
