"""Chooses which positions of an axis a figure labels, and makes the spaces in their tokens visible."""

import re
from typing import Final


def spread(count: int, at_most: int) -> list[int]:
    """Up to `at_most` of `count` positions, evenly spaced from the first to the last.

    >>> spread(12, 4), spread(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    if count <= at_most:
        return list(range(count))
    return [0] if at_most == 1 else sorted({round(step * (count - 1) / (at_most - 1)) for step in range(at_most)})


_LABEL: Final = re.compile(r"[\w.,]+( [\w.,]+)+|<(img|video|sound) \d.*>")
"""Matches words separated by a space, such as the time of a frame, and the name of a part of a picture or sound."""


def token_text(token: str) -> str:
    """A token with visible spaces, line ends and tabs; a space between words stays a space.

    >>> token_text(" the"), token_text("\\n"), token_text("0.34 s")
    ('·the', '⏎', '0.34 s')
    """
    if _LABEL.fullmatch(token):
        return token
    return token.replace(" ", "·").replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥") or "∅"
