"""The names of the axes: the same words in annotations, einops patterns, frames and plot labels.

>>> axis_label("query")
'query token'
"""

from typing import Final

BATCH: Final = "batch"
POSITION: Final = "position"
QUERY: Final = "query"
KEY: Final = "key"
LAYER: Final = "layer"
HEAD: Final = "head"
KV_HEAD: Final = "kv_head"
D_HEAD: Final = "d_head"
D_MODEL: Final = "d_model"
SOURCE: Final = "source"
VOCAB: Final = "vocab"

_LABELS: Final = {
    BATCH: "sequence",
    POSITION: "token position",
    QUERY: "query token",
    KEY: "key token",
    LAYER: "layer",
    HEAD: "head",
    KV_HEAD: "key-value head",
    D_HEAD: "head dimension",
    D_MODEL: "model dimension",
    SOURCE: "writer upstream",
    VOCAB: "vocabulary entry",
}


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
