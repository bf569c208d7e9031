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


def token_text(token: str) -> str:
    """A token as it is shown to a reader: spaces, line ends and tabs made visible.

    >>> token_text(" the"), token_text("\\n")
    ('·the', '⏎')
    """
    return token.replace(" ", "·").replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥") or "∅"
