"""The words for inputs and their positions: texts of tokens, images of patches, recordings of frames."""

from dataclasses import dataclass, replace
from typing import Final


def counted(count: int, distinct: int | None = None, noun: str = "text") -> str:
    """The number of texts in words, and how many are left if copies count once.

    >>> counted(1), counted(14, 14), counted(14, 3, "pair")
    ('1 text', '14 texts', '14 pairs (3 distinct)')
    """
    apart = "" if distinct is None or distinct == count else f" ({distinct:,} distinct)"
    return f"{count:,} {noun}{'' if count == 1 else 's'}{apart}"


def bracketed(words: str) -> str:
    """Words in brackets; a comma replaces brackets within.

    >>> bracketed("14 texts (3 distinct)"), bracketed("14 texts")
    ('(14 texts, 3 distinct)', '(14 texts)')
    """
    return f"({words.replace(' (', ', ').replace(')', '')})"


@dataclass(frozen=True)
class Nouns:
    """The words for an input and its positions, in sentences and figures.

    >>> f"Every {IMAGE.query_token} looks at a {IMAGE.key_token} of the {IMAGE.text}, or at the {IMAGE.first}."
    'Every query patch looks at a key patch of the image, or at the first position.'
    """

    text: str
    token: str
    tokens: str
    place: str = "position"  # the word for any position ("position" in an image, whose class token is not a patch)
    keys: "Nouns | None" = None  # the words for the keys, if keys and queries come from different kinds of input
    rows: str = ""  # the words for the queries, if they are some of the keys

    @property
    def first(self) -> str:
        """The word for the first position, which may be a class token."""
        return f"first {self.place}"

    @property
    def of_keys(self) -> "Nouns":
        """The words for the keys."""
        return self.keys or self

    @property
    def query_token(self) -> str:
        """The word for a query position."""
        return f"query {self.token}"

    @property
    def key_token(self) -> str:
        """The word for a key position."""
        return f"key {self.of_keys.token}"

    @property
    def key_text(self) -> str:
        """The word for the input that the keys come from, in cross-attention."""
        return f"encoder's {self.text}" if self.keys is None else self.keys.text

    @property
    def both_texts(self) -> str:
        """The words for both inputs of cross-attention."""
        if self.rows:
            return self.text
        return f"two {self.text}s" if self.keys is None else f"{self.text} and the {self.keys.text}"

    @property
    def any_token(self) -> str:
        """The word for a position that may be a query or a key.

        >>> TEXT.any_token, HEARD.any_token
        ('token', 'token or frame')
        """
        return self.token if self.keys is None or self.rows else f"{self.token} or {self.keys.token}"

    @property
    def for_views(self) -> dict[str, str]:
        """The words as a dictionary, for the scripts of views and pages."""
        return {
            "first": self.of_keys.first,
            "token": self.token,
            "tokens": self.tokens,
            "key": self.of_keys.token,
            "queries": f"query {self.tokens}",
            "keys": f"key {self.of_keys.tokens}",
        }


TEXT: Final = Nouns("text", "token", "tokens", "token")
IMAGE: Final = Nouns("image", "patch", "patches")
SOUND: Final = Nouns("recording", "frame", "frames")
INPUT: Final = Nouns("input", "position", "positions")  # for a module of the user's own
AFTER_SENSES: Final = replace(TEXT, keys=TEXT, rows="the tokens after the last picture or sound")
"""For the rows of a text after its last picture or sound, which attend to the whole text."""
HEARD: Final = Nouns("text", "token", "tokens", "token", keys=SOUND)  # for cross-attention from a text to a recording
