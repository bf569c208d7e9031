"""What a reader should know about the demo model before trusting what it does with a text."""

from collections.abc import Sequence
from typing import Final

ABOUT = (
    "This is the demo model of attnmech: a small decoder trained on sentences that a grammar generated. It has learnt "
    "that grammar (which verb form a subject takes, whom he, she and it refer to, how a bracket closes, names and "
    "phrases that recur), and its vocabulary of some 2,000 words. It knows nothing of the world, and is no guide to "
    "what large language models do."
)

FIRST_WORD: Final = 300
"""Ids below this one are special tokens, the 256 bytes and reserved ids; words have the rest."""


def notes(ids: Sequence[int]) -> list[str]:
    """Returns remarks to show beside a text of these tokens.

    >>> import attnmech as am
    >>> notes(am.load().tokenizer.encode("The wug is new."))[1]
    '4 of the 9 tokens are single bytes: the model has no words for what they spell.'
    """
    spelt = sum(2 < token < FIRST_WORD for token in ids)
    if not spelt:
        return [ABOUT]
    are = "is a single byte" if spelt == 1 else "are single bytes"
    return [ABOUT, f"{spelt} of the {len(ids)} tokens {are}: the model has no words for what they spell."]
