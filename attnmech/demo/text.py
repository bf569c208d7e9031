"""The texts that attnmech uses by default, read from `texts.zip`.

`examples/demo_model/write_texts.py` makes that file with the grammar of the demo model's language.
"""

import json
import re
from collections.abc import Sequence
from typing import Final
from zipfile import ZipFile

from ..errors import InputError
from . import model_folder

PARAGRAPH = (
    "Anna painted a small boat near the harbour. The sails behind the blue boat (made by Tom) were new. "
    "Anna lost her anchor, so she walked to the beach. When Anna and Tom came to the harbour, Tom gave "
    "an old anchor to Anna. Anna sang of shells and waves, of shells and waves."
)
"""A short story in the demo model's language.

It has a name that recurs, a verb that agrees across another noun, a bracket, a pronoun, a recipient
and a repeated span.
"""

STORED: Final = (2000, 200, 200, 200, 200, 200)
"""The number of texts stored for each seed."""


def documents(count: int, seed: int = 0) -> list[str]:
    """Returns texts in the demo model's language, to measure the model on.

    There are 2,000 texts for seed 0 and 200 others for each of the seeds 1 to 5.

    >>> len(documents(3))
    3
    """
    return _lines("texts", count, seed)


def labelled(count: int, seed: int = 0) -> list[tuple[tuple[str, ...], int, int, str]]:
    """Returns pairs of words of `documents(count, seed)` that belong together: (words, query, key, relation).

    >>> words, query, key, relation = labelled(3)[0]
    >>> query > key, "".join(words) == documents(3)[0]
    (True, True)
    """
    texts = zip(documents(count, seed), _lines("relations", count, seed), strict=True)
    return [
        (words, query, key, relation)
        for text, relations in texts
        for words in [tuple(re.findall(r" ?\w+| ?[^\w\s]", text))]
        for query, key, relation in json.loads(relations)
    ]


def _lines(name: str, count: int, seed: int) -> list[str]:
    if seed not in range(len(STORED)) or count not in range(STORED[seed] + 1):
        raise InputError(
            f"the demo model has {STORED[0]:,} texts for seed 0 and {STORED[1]} for each of the seeds 1 to "
            f"{len(STORED) - 1}; got count={count!r}, seed={seed!r}. "
            "The repository's examples/demo_model/language/grammar.py makes more."
        )
    return stored(f"{name}/{seed}")[:count]


def stored(name: str) -> list[str]:
    """Returns the lines of a file in `texts.zip`."""
    with ZipFile(model_folder().with_name("texts.zip")) as texts:
        return texts.read(name).decode().splitlines()


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
