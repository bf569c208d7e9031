"""How many places of an axis are shown, and how a token is written at it."""

import re
from typing import Final


def spread(count: int, at_most: int) -> list[int]:
    """So many of `count` places at most, evenly from the first to the last.

    >>> spread(12, 4), spread(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    if count <= at_most:
        return list(range(count))
    if at_most == 1:
        return [0]
    return sorted({round(place * (count - 1) / (at_most - 1)) for place in range(at_most)})


_LABEL: Final = re.compile(r"[\w.,]+( [\w.,]+)+")
"""Words with a space between them, such as the time of a frame."""


def token_text(token: str) -> str:
    """A token as it is shown to a reader: spaces, line ends and tabs made visible.

    Between words, a space is seen as it is.

    >>> token_text(" the"), token_text("\\n"), token_text("0.34 s")
    ('·the', '⏎', '0.34 s')
    """
    if _LABEL.fullmatch(token):
        return token
    return token.replace(" ", "·").replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥") or "∅"
