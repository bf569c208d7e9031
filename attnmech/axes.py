"""The axes of a plot, how many places of one are shown, and how a token is written at it.

>>> axis_label("query")
'query token'
"""

from typing import Final

QUERY: Final = "query"
KEY: Final = "key"

_LABELS: Final = {QUERY: "query token", KEY: "key token"}


def axis_label(axis: str) -> str:
    """The words that stand at a plot's axis for `axis`."""
    return _LABELS[axis]


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


def token_text(token: str) -> str:
    """A token as it is shown to a reader: spaces, line ends and tabs made visible.

    >>> token_text(" the"), token_text("\\n")
    ('·the', '⏎')
    """
    return token.replace(" ", "·").replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥") or "∅"
