"""What a page of joint embeddings shows: the queries and keys of many heads as points in one plane, with their tokens.

Queries and keys of a head stand in one space (AttentionViz, Yeh et al. 2023, arXiv 2305.03210), so that a query is
near the keys that it attends to (docs/formulas.md#joint-embedding). Nothing here knows how the points were found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import InputError


@dataclass(frozen=True)
class EmbeddingHead:
    """The points of one head, and what is known of it."""

    layer: int
    head: int
    points: Mapping[str, np.ndarray]
    """By projection ("pca", "tsne"): [2 * tokens, dims], the queries and then the keys, in the tokens' order."""
    norms: np.ndarray
    """[2 * tokens]: the norm of each query and key before they were scaled and shifted."""
    highest: np.ndarray
    """[tokens, 2]: the two keys with the most attention of each query, as indices of tokens; -1 where there is none."""
    weights: np.ndarray
    """[tokens, 2]: their attention, from 0 to 1."""
    scale: float
    """c: queries were multiplied by it, keys divided."""
    curve: tuple[np.ndarray, np.ndarray]
    """Values of c, and the criterion at each."""
    numbers: Mapping[str, float]
    """Figures to show, by label, in order."""
    kind: str
    """The type that is claimed of the head, "" for none."""


@dataclass(frozen=True)
class EmbeddingText:
    """A text whose attention the page carries whole."""

    labels: Sequence[str]
    special: Sequence[bool]
    patterns: np.ndarray
    """[head query key] after softmax, float16 or float32, in the order of the view's heads."""
    rest: np.ndarray | None = None
    """[head query]: what no key has, such as a sink's share; None where rows sum to 1."""


@dataclass(frozen=True)
class EmbeddingImages:
    """Where the tokens are patches of images."""

    pictures: Mapping[int, str]
    """By text, the picture as a data URI; of the others only the patches' colours are known."""
    grid: tuple[int, int]
    """Rows and columns of patches in each picture."""
    place: np.ndarray
    """[tokens, 2]: the row and the column of each token's patch; -1 for tokens that are none ([CLS])."""
    colours: np.ndarray
    """[tokens, 3]: the mean red, green and blue of each patch, from 0 to 255."""


@dataclass(frozen=True)
class EmbeddingView:
    """All that the page shows."""

    title: str
    model: str
    heads: Sequence[EmbeddingHead]
    labels: Sequence[str]
    """[tokens], as a reader should see them."""
    text: np.ndarray
    """[tokens]: the number of the text, from 0."""
    position: np.ndarray
    """[tokens]: the position in the text, from 0."""
    lengths: np.ndarray
    """[texts]: how many tokens each text has."""
    special: np.ndarray
    """[tokens] bool."""
    classes: Sequence[str]
    """[tokens]: word, number, punctuation, …"""
    texts: Mapping[int, EmbeddingText]
    """The texts that are carried whole, by number."""
    notes: Sequence[str]
    """Sentences to show: what was sampled, what the scores have that distances have not."""
    anomalies: Sequence[tuple[int, int, str, float]]
    """(layer, head, what, number), the strongest first."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """What a label of `EmbeddingHead.numbers` means, in a sentence."""
    images: EmbeddingImages | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.heads or not len(self.labels):
            raise InputError(f"nothing to show: {len(self.heads)} heads, {len(self.labels)} tokens.")
        places = [(each.layer, each.head) for each in self.heads]
        if places != sorted(set(places)):
            raise InputError(f"`heads` must come by layer and head, each once; got {places}.")
        names = list(self.heads[0].points)
        if not names or any(list(each.points) != names for each in self.heads):
            raise InputError("`heads` must all have the same projections, and at least one.")
        for name, found, wanted in self._shapes():
            if found != wanted:
                raise InputError(f"`{name}` must have the shape {wanted}; got {found}.")

    def _shapes(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The name, the shape and the expected shape of each array."""
        count = len(self.labels)
        per_token = {name: getattr(self, name) for name in ("text", "position", "special", "classes")}
        shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
        shapes = [(name, (len(each),), (count,)) for name, each in per_token.items()]
        for each in self.heads:
            where = f"L{each.layer}H{each.head}"
            for name, points in each.points.items():
                dims = self.heads[0].points[name].shape[-1]
                shapes.append((f"points[{name!r}] of {where}", points.shape, (2 * count, 3 if dims == 3 else 2)))
            shapes.append((f"norms of {where}", each.norms.shape, (2 * count,)))
            shapes += [(f"{name} of {where}", getattr(each, name).shape, (count, 2)) for name in ("highest", "weights")]
        for number, text in self.texts.items():
            length = len(text.labels)
            shapes.append((f"patterns of text {number}", text.patterns.shape, (len(self.heads), length, length)))
            if text.rest is not None:
                shapes.append((f"rest of text {number}", text.rest.shape, (len(self.heads), length)))
        if self.images is not None:
            shapes.append(("place", self.images.place.shape, (count, 2)))
            shapes.append(("colours", self.images.colours.shape, (count, 3)))
        return shapes
