"""The numbers that the page shows: those of figures 1 to 10, and the rows of its tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from jaxtyping import Float32, Int32

from ..basics.fields import check_fields
from ..basics.nouns import TEXT, Nouns
from ..errors import InputError
from .chart import ByChoice
from .patterns import value_weighted
from .text import percent, quoted


@dataclass(frozen=True)
class ScoreNumbers:
    """All numbers that figures 1 to 3 show for one text, for every layer and head."""

    tokens: tuple[str, ...]  # the text's tokens as the tokenizer gave them
    layers: tuple[int, ...]  # the labels of the layers shown; heads are numbered from 0
    scores: Float32[np.ndarray, "layer head query key"]  # score before softmax; hidden cells are NaN
    pattern: Float32[np.ndarray, "layer head query key"]
    """The attention of each query to each key: probabilities after softmax, as active hooks left them."""
    ranked_key: Int32[np.ndarray, "layer head query rank"]
    """The key of each rank, by falling score from rank 0; -1 where the row has fewer visible keys."""
    ranked_share: Mapping[str, Float32[np.ndarray, "layer head query rank"]]
    """The share of each term ("position", "key_bias", "query_key", …) in that score, 0 to 1; NaN where undefined."""
    key_terms: Mapping[str, Float32[np.ndarray, "layer head key"]]
    """The terms that depend on the key alone, in units of the score; may be empty."""
    key_terms_of_last: bool = False
    """Whether `key_terms` also depend on distance; they are then the last query's, NaN at keys hidden from it."""
    notes: tuple[str, ...] = ()  # sentences shown before the figures, such as "this model has no position term"
    terms: Mapping[str, Float32[np.ndarray, "layer head #query #key"]] = field(default_factory=dict)
    """Every term of the scores without the mask; an axis along which a term is constant has length 1."""
    special: tuple[bool, ...] = ()  # for each token, whether it is a special token of the tokenizer; empty if none is
    written: int = 0  # the number of last tokens that the model wrote
    value_norms: Float32[np.ndarray, "layer head key"] | None = None
    """‖f(x_j)‖ of each key in each head; the page then also shows value-weighted attention."""
    keys: tuple[str, ...] = ()
    """In cross-attention, the tokens of the text that `tokens` attend to; empty in self-attention."""
    key_special: tuple[bool, ...] = ()  # for each of `keys`, whether it is a special token; empty if none is
    nouns: Nouns = TEXT  # the words for the input and its positions

    @property
    def crosses(self) -> bool:
        """Whether queries and keys are tokens of two texts, so that no key is the query itself."""
        return bool(self.keys)

    @property
    def first(self) -> int:
        """The position of the first query."""
        return len(self.keys) - len(self.tokens) if self.nouns.rows else 0

    @property
    def key_tokens(self) -> tuple[str, ...]:
        return self.keys or self.tokens

    def named_key(self, position: int) -> str:
        """A key's position and token, for sentences."""
        return f"{position} {quoted(self.key_tokens[position])}"

    def named_token(self, position: int) -> str:
        """A query's position and token, for sentences."""
        return f"{self.first + position} {quoted(self.tokens[position])}"

    def __post_init__(self) -> None:
        check_fields(self, {"layer": len(self.layers), "query": len(self.tokens), "key": len(self.key_tokens)})
        norms = {} if self.value_norms is None else {"value_norms": self.value_norms}
        _require_finite(
            {"scores": self.scores, "pattern": self.pattern, **self.ranked_share, **self.key_terms, **norms}
        )

    def terms_of_row(self, layer: int, head: int, query: int) -> dict[str, Float32[np.ndarray, " key"]]:
        """Every term at each key of one row; `layer` is an index into `layers`."""
        shape = self.scores.shape[2:]
        return {name: np.broadcast_to(term[layer, head], shape)[query] for name, term in self.terms.items()}


@dataclass(frozen=True)
class FocusNumbers:
    """All numbers that figures 4 to 6 show: the fractions of rows in which each head attends most to certain keys."""

    layers: tuple[int, ...]  # the labels of the layers; heads are numbered from 0
    self_top: Float32[np.ndarray, "layer head"]
    """Fraction of rows whose highest score is at the query itself, 0 to 1; NaN where no row counts."""
    first_top: Float32[np.ndarray, "layer head"]  # fraction of rows whose highest score is at position 0
    previous_top: Float32[np.ndarray, "layer head"]
    """Fraction of rows whose highest score is at the token before the query. These three fractions overlap: in row 1,
    the previous token is the first.
    """
    concentration: Float32[np.ndarray, "layer head"]  # mean over rows of p(1) - p(2), the two highest probabilities
    rows: str  # the rows that count, in words, such as "row 0 is left out: it sees only itself"
    low: Mapping[str, Float32[np.ndarray, "layer head"]] = field(default_factory=dict)
    """The lower ends of intervals, by the name of the field; empty without intervals."""
    high: Mapping[str, Float32[np.ndarray, "layer head"]] = field(default_factory=dict)
    """The upper ends, with the names of `low`."""
    crosses: bool = False
    """Whether queries and keys are tokens of two texts; then no key is the query itself or the previous token."""
    nouns: Nouns = TEXT  # the words for the input and its positions

    def __post_init__(self) -> None:
        check_fields(self, {"layer": len(self.layers)})


FOCUS_NUMBERS: Final = ("self_top", "first_top", "previous_top", "concentration")
"""The fields of `FocusNumbers` that hold numbers by layer and head."""

Side = Literal["query", "target"]
"""Sides of an update, in order: what is added at the query, and what the most attended key's value would write."""


@dataclass(frozen=True)
class UpdateNumbers:
    """All numbers that figures 7 to 10 show for one text: how far and in which direction each head moves the stream."""

    tokens: tuple[str, ...]  # the text's tokens as the tokenizer gave them
    layers: tuple[int, ...]  # the labels of the layers; heads are numbered from 0
    magnitude: Float32[np.ndarray, "side layer head token"]
    """‖u‖ / ‖x‖, by side: of the head's update u and the residual stream x that enters the block, at the query; and of
    v W_O, without its probability, at the key that this query attends to most. NaN where undefined.
    """
    orientation: Float32[np.ndarray, "side layer head token"]
    """cos(u, x) by side, -1 to 1; NaN where u is 0 or undefined."""
    attended: Int32[np.ndarray, "layer head token"]
    """The key that each query attends to most; -1 where it has no choice."""
    nouns: Nouns = TEXT  # the words for the input and its positions

    def __post_init__(self) -> None:
        check_fields(self, {"side": 2, "layer": len(self.layers), "token": len(self.tokens)})
        _require_finite({"magnitude": self.magnitude, "orientation": self.orientation})


def _require_finite(arrays: Mapping[str, np.ndarray | None]) -> None:
    for name, array in arrays.items():
        if array is not None and np.isinf(array).any():
            raise InputError(f"`{name}` must be finite, or NaN where it is undefined or hidden; got an infinity.")


@dataclass(frozen=True)
class TableRow:
    """One row of a table: a name, its value and, for a check, the outcome and the reason."""

    label: str
    value: str
    status: Literal["ok", "warn", "fail"] | None = None
    detail: str = ""


def row_sentences(view: ScoreNumbers) -> ByChoice:
    """Sentences on the three keys that each query attends to most, or gets most from, in every head."""
    norms = view.value_norms
    weights = [view.pattern] if norms is None else [view.pattern, value_weighted(view.pattern, norms)]
    top = [np.argsort(-attention, axis=-1, kind="stable")[..., :3] for attention in weights]
    seen = [(attention > 0).sum(axis=-1) for attention in weights]

    def sentence(*place: int) -> str:
        weighted, (layer, head, query) = len(place) > 3 and place[0] == 1, place[-3:]
        row, count = weights[weighted][layer, head, query], int(seen[weighted][layer, head, query])
        keys = top[weighted][layer, head, query, :count].tolist()
        parts = [f"{percent(float(row[key]))} {'from' if weighted else 'to'} {view.named_key(key)}" for key in keys]
        listed = f"{', '.join(parts) or 'nothing'}{', …' if count > 3 else '.'}"
        if weighted:
            return f"Shares of the norms ‖p f(x)‖ that this head writes to query {view.named_token(query)}: {listed}"
        return f"Attention of query {view.named_token(query)}: {listed}"

    if norms is None:
        return ByChoice.texts(("layer", "head", "query"), view.scores.shape[:3], sentence)
    return ByChoice.texts(("weight", "layer", "head", "query"), (2, *view.scores.shape[:3]), sentence)
