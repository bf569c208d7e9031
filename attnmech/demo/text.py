"""The texts that attnmech uses by default."""

from random import Random

from .grammar import document

PARAGRAPH = (
    "Anna painted a small boat near the harbour. The sails behind the blue boat (made by Tom) were new. "
    "Anna lost her anchor, so she walked to the beach. When Anna and Tom came to the harbour, Tom gave "
    "an old anchor to Anna. Anna sang of shells and waves, of shells and waves."
)
"""A short story in the demo model's language.

It has a name that recurs, a verb that agrees across another noun, a bracket, a pronoun, a recipient
and a repeated span.
"""


def documents(count: int, seed: int = 0) -> list[str]:
    """Returns texts in the demo model's language, to measure the model on.

    >>> len(documents(3))
    3
    """
    rng = Random(seed)
    return [document(rng, sentences=4).text for _ in range(count)]


def labelled(count: int, seed: int = 0) -> list[tuple[tuple[str, ...], int, int, str]]:
    """Returns pairs of words of `documents(count, seed)` that belong together: (words, query, key, relation).

    >>> words, query, key, relation = labelled(3)[0]
    >>> query > key, "".join(words) == documents(3)[0]
    (True, True)
    """
    rng = Random(seed)
    return [
        (text.words, link.query, link.key, link.relation)
        for text in (document(rng, sentences=4) for _ in range(count))
        for link in text.relations
    ]
