"""The data of a page of joint embeddings: queries and keys of many heads as points in one plane, with their tokens.

A head's queries and keys lie in one space (AttentionViz, Yeh et al. 2023, arXiv 2305.03210), where a query is near the
keys that it attends to (docs/formulas.md#joint-embedding). This module does not depend on how the points were computed.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_BYTES: Final = re.compile(r"(?<=[^\0-\x7f])\[[1-4](?:,[1-4])*/[2-4]\]|\\x[89a-f][0-9a-f]")
"""The notation of labels for the bytes that a token holds, which is not text: 你[1,2/3], \\xff.

The numbers are at most 4, so that a footnote in brackets is not taken for it.
"""


def searched(label: str) -> str:
    r"""Returns the characters of a token in which a search looks, composed.

    >>> searched("你[1,2/3]"), searched(r"\xff"), searched("e\u0301 [1/2]") == "\u00e9 [1/2]"
    ('你', '', True)
    """
    return unicodedata.normalize("NFC", _BYTES.sub("", label))


@dataclass(frozen=True)
class EmbeddingHead:
    """The points and numbers of one head."""

    layer: int
    head: int
    points: Mapping[str, np.ndarray]
    """By projection ("pca", "tsne"): [2 * tokens, dims], the queries and then the keys, in the tokens' order."""
    norms: np.ndarray
    """[2 * tokens]: the norms of queries and keys before scale and shift."""
    highest: np.ndarray
    """[tokens, 2]: each query's two most attended keys, as indices of tokens; -1 where there is none."""
    weights: np.ndarray
    """[tokens, 2]: the attention to these keys, from 0 to 1."""
    scale: float
    """The factor c by which queries were multiplied and keys divided."""
    curve: tuple[np.ndarray, np.ndarray]
    """The values of c that were tried, and the criterion at each."""
    numbers: Mapping[str, float]
    """Numbers to show, by label, in order."""
    kind: str
    """The head's type; "" if none is claimed."""


@dataclass(frozen=True)
class EmbeddingText:
    """A text with its whole attention patterns."""

    labels: Sequence[str]
    special: Sequence[bool]
    patterns: np.ndarray
    """[head query key] after softmax, float16 or float32, in the order of the view's heads."""
    rest: np.ndarray | None = None
    """[head query]: the weight that goes to no key, such as a sink's share; None where rows sum to 1."""


@dataclass(frozen=True)
class EmbeddingImages:
    """The images of tokens that are patches."""

    pictures: Mapping[int, str]
    """By text, the picture as a data URI; images without a picture have only the colours of their patches."""
    grid: tuple[int, int]
    """Rows and columns of patches in each picture."""
    place: np.ndarray
    """[tokens, 2]: the row and column of each token's patch; -1 for tokens that are not patches ([CLS])."""
    colours: np.ndarray
    """[tokens, 3]: the mean red, green and blue of each patch, from 0 to 255."""


@dataclass(frozen=True)
class EmbeddingView:
    """Everything that the page shows."""

    title: str
    model: str
    heads: Sequence[EmbeddingHead]
    labels: Sequence[str]
    """[tokens]: the tokens' labels on the page."""
    text: np.ndarray
    """[tokens]: the number of the text, from 0."""
    position: np.ndarray
    """[tokens]: the position in the text, from 0."""
    lengths: np.ndarray
    """[texts]: the number of tokens in each text."""
    special: np.ndarray
    """[tokens] bool."""
    classes: Sequence[str]
    """[tokens]: word, number, punctuation, …"""
    texts: Mapping[int, EmbeddingText]
    """The texts with their whole attention patterns, by number."""
    notes: Sequence[str]
    """Sentences to show, such as what was sampled and which part of the scores distances leave out."""
    anomalies: Sequence[tuple[int, int, str, float]]
    """(layer, head, what, number), the strongest first."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """The meaning of each label of `EmbeddingHead.numbers`, in a sentence."""
    images: EmbeddingImages | None = None
