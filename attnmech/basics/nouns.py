"""What inputs and their positions are called: texts of tokens, images of patches, recordings of frames."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Nouns:
    """The words for one input and one of its positions; sentences and figures are made with them.

    >>> f"Every {IMAGE.query_token} looks at a {IMAGE.key_token} of the {IMAGE.text}, or at the {IMAGE.first}."
    'Every query patch looks at a key patch of the image, or at the first position.'
    """

    text: str
    token: str
    tokens: str
    place: str = "position"
    """A position of any kind: not all positions of an image are patches."""
    keys: "Nouns | None" = None
    """The words for keys, if they belong to an input of another kind."""

    @property
    def first(self) -> str:
        """The first position, which may be a class token."""
        return f"first {self.place}"

    @property
    def of_keys(self) -> "Nouns":
        """The words for what is attended to."""
        return self.keys or self

    @property
    def query_token(self) -> str:
        """A position that attends."""
        return f"query {self.token}"

    @property
    def key_token(self) -> str:
        """A position that is attended to."""
        return f"key {self.of_keys.token}"

    @property
    def key_text(self) -> str:
        """In cross-attention, the input that is attended to."""
        return f"encoder's {self.text}" if self.keys is None else self.keys.text

    @property
    def both_texts(self) -> str:
        """In cross-attention, the two inputs."""
        return f"two {self.text}s" if self.keys is None else f"{self.text} and the {self.keys.text}"

    @property
    def any_token(self) -> str:
        """A query or a key.

        >>> TEXT.any_token, HEARD.any_token
        ('token', 'token or frame')
        """
        return self.token if self.keys is None else f"{self.token} or {self.keys.token}"

    @property
    def for_views(self) -> dict[str, str]:
        """What the scripts of views and pages write."""
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
INPUT: Final = Nouns("input", "position", "positions")
"""Of a module of the user's own."""
HEARD: Final = Nouns("text", "token", "tokens", "token", keys=SOUND)
"""Of cross-attention from a text to a recording."""
