"""What the page shows: every number of figures 1 to 10, and the facts around them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from jaxtyping import Float32, Int32

from ..basics.nouns import TEXT, Nouns
from ..errors import InputError
from .chart import ByChoice
from .patterns import value_weighted
from .text import percent, quoted


@dataclass(frozen=True)
class ScoreNumbers:
    """Every number that figures 1 to 3 show for one text, for all layers and heads to choose from."""

    tokens: tuple[str, ...]
    """The text's tokens as the tokenizer gave them."""
    layers: tuple[int, ...]
    """The labels of the layers shown; heads are numbered from 0."""
    scores: Float32[np.ndarray, "layer head query key"]
    """Score before softmax; hidden cells are NaN."""
    pattern: Float32[np.ndarray, "layer head query key"]
    """The attention that each query gives each key: probabilities after softmax, as hooks in force left them."""
    ranked_key: Int32[np.ndarray, "layer head query rank"]
    """The key of the rank-th highest score, rank 0 the highest; -1 where the row has fewer visible keys."""
    ranked_share: Mapping[str, Float32[np.ndarray, "layer head query rank"]]
    """Per term ("position", "key_bias", "query_key", …) its share of that score, 0 to 1; NaN where undefined."""
    key_terms: Mapping[str, Float32[np.ndarray, "layer head key"]]
    """The terms that depend on the key alone, in units of the score; may be empty."""
    key_terms_of_last: bool = False
    """Whether these depend on the distance too, and are as the last query sees them; NaN at keys hidden from it."""
    notes: tuple[str, ...] = ()
    """Sentences that stand before the figures, such as "this model has no position term"."""
    terms: Mapping[str, Float32[np.ndarray, "layer head query_or_1 key_or_1"]] = field(default_factory=dict)
    """Every term of the scores without the mask, of length 1 along an axis on which it does not depend."""
    special: tuple[bool, ...] = ()
    """Which tokens are special ones of the tokenizer; none if left out."""
    value_norms: Float32[np.ndarray, "layer head key"] | None = None
    """‖f(x_j)‖ of each key in each head; the page then shows value-weighted attention, too."""
    keys: tuple[str, ...] = ()
    """In cross-attention the tokens of the text that `tokens` attend to; empty where these attend to each other."""
    key_special: tuple[bool, ...] = ()
    """Which of `keys` are special tokens; none if left out."""
    nouns: Nouns = TEXT
    """What the input and its positions are called."""

    @property
    def crosses(self) -> bool:
        """Whether queries and keys are tokens of two texts: then no key is the query itself."""
        return bool(self.keys)

    @property
    def key_tokens(self) -> tuple[str, ...]:
        """The tokens that can be attended to."""
        return self.keys or self.tokens

    def named_key(self, position: int) -> str:
        """A key's position and token, as sentences name it."""
        return f"{position} {quoted(self.key_tokens[position])}"

    def named_token(self, position: int) -> str:
        """Likewise a query's."""
        return f"{position} {quoted(self.tokens[position])}"

    def __post_init__(self) -> None:
        if not self.tokens or not self.layers or not self.ranked_share:
            raise InputError("A view needs at least one token, one layer and one term in `ranked_share`; got none.")
        heads, ranks = self.ranked_key.shape[1], self.ranked_key.shape[3]
        by_head = (len(self.layers), heads, len(self.tokens))
        by_key = (len(self.layers), heads, len(self.key_tokens))
        expected = {
            "scores": (self.scores, (*by_head, len(self.key_tokens))),
            "pattern": (self.pattern, (*by_head, len(self.key_tokens))),
            "ranked_key": (self.ranked_key, (*by_head, ranks)),
            **{f"ranked_share[{name!r}]": (share, (*by_head, ranks)) for name, share in self.ranked_share.items()},
            **{f"key_terms[{name!r}]": (term, by_key) for name, term in self.key_terms.items()},
            **({} if self.value_norms is None else {"value_norms": (self.value_norms, by_key)}),
        }
        for name, (array, shape) in expected.items():
            if array.shape != shape:
                raise InputError(f"`{name}` must have the shape {shape} of the tokens and layers; got {array.shape}.")
            if np.isinf(array).any():
                raise InputError(f"`{name}` must be finite, with NaN where a cell is hidden; got an infinity.")
        for name, term in self.terms.items():
            whole = (*by_head, len(self.key_tokens))
            fits = term.ndim == 4 and all(one in (1, all_) for one, all_ in zip(term.shape[2:], whole[2:], strict=True))
            if term.shape[:2] != by_head[:2] or not fits:
                raise InputError(f"`terms[{name!r}]` must broadcast to the shape {whole}; got {term.shape}.")

    def terms_of_row(self, layer: int, head: int, query: int) -> dict[str, Float32[np.ndarray, " key"]]:
        """Every term at each key of one row; `layer` counts the view's layers."""
        shape = self.scores.shape[2:]
        return {name: np.broadcast_to(term[layer, head], shape)[query] for name, term in self.terms.items()}


@dataclass(frozen=True)
class FocusNumbers:
    """Every number that figures 4 to 6 show: where the heads of all layers look, as fractions of rows."""

    layers: tuple[int, ...]
    """The labels of the layers; heads are numbered from 0."""
    self_top: Float32[np.ndarray, "layer head"]
    """Fraction of rows whose highest score is at the query itself, 0 to 1; NaN where no row counts."""
    first_top: Float32[np.ndarray, "layer head"]
    """Fraction of rows whose highest score is at position 0."""
    previous_top: Float32[np.ndarray, "layer head"]
    """Fraction of rows whose highest score is at the token before the query. The three overlap: in row 1, the
    previous token is the first."""
    concentration: Float32[np.ndarray, "layer head"]
    """Mean over rows of p(1) - p(2), the two highest probabilities."""
    rows: str
    """Which rows count, such as "row 0 is left out: it sees only itself"."""
    low: Mapping[str, Float32[np.ndarray, "layer head"]] = field(default_factory=dict)
    """The lower ends of intervals, by the name of the number above; empty where there are none."""
    high: Mapping[str, Float32[np.ndarray, "layer head"]] = field(default_factory=dict)
    """The upper ends, with the names of `low`."""
    crosses: bool = False
    """Whether queries and keys are tokens of two texts: then none is itself, or the one before."""
    nouns: Nouns = TEXT
    """What the input and its positions are called."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("A view needs at least one layer; got none.")
        if self.low.keys() != self.high.keys() or not self.low.keys() <= set(FOCUS_NUMBERS):
            raise InputError(
                f"`low` and `high` must have the same names, out of {', '.join(FOCUS_NUMBERS)}; "
                f"got {sorted(self.low)} and {sorted(self.high)}."
            )
        shape = (len(self.layers), self.self_top.shape[1])
        arrays = {
            **{name: getattr(self, name) for name in FOCUS_NUMBERS},
            **{f"low[{name!r}]": array for name, array in self.low.items()},
            **{f"high[{name!r}]": array for name, array in self.high.items()},
        }
        for name, array in arrays.items():
            if array.shape != shape:
                raise InputError(f"`{name}` must have the shape {shape} of the layers and heads; got {array.shape}.")
            outside = array[(array < -_ROUNDING) | (array > 1 + _ROUNDING)]
            if outside.size:
                raise InputError(f"`{name}` must lie between 0 and 1, with NaN where undefined; got {outside[0]}.")


FOCUS_NUMBERS: Final = ("self_top", "first_top", "previous_top", "concentration")
"""The numbers of a `FocusNumbers`."""

_ROUNDING: Final = 1e-5
"""How far a mean of float32 numbers may stray beyond 0 and 1."""

Side = Literal["query", "target"]
"""Sides of an update: what is added at the query, or what the most attended key's value would write."""


@dataclass(frozen=True)
class UpdateNumbers:
    """Every number that figures 7 to 10 show for one text: how much and which way each head moves the stream."""

    tokens: tuple[str, ...]
    """The text's tokens as the tokenizer gave them."""
    layers: tuple[int, ...]
    """The labels of the layers; heads are numbered from 0."""
    magnitude: Float32[np.ndarray, "layer head token"]
    """‖u‖ / ‖x‖ at the query: u the head's update there, x the residual stream that enters the block there."""
    orientation: Float32[np.ndarray, "layer head token"]
    """cos(u, x) at the query, -1 to 1; NaN where u is 0."""
    target_magnitude: Float32[np.ndarray, "layer head token"]
    """‖v W_O‖ / ‖x‖ of the key that this query attends to most, without its probability; NaN where undefined."""
    target_orientation: Float32[np.ndarray, "layer head token"]
    """cos(v W_O, x) of that key; NaN where undefined."""
    attended: Int32[np.ndarray, "layer head token"]
    """The key that each query attends to most; -1 where it has no choice."""
    nouns: Nouns = TEXT
    """What the input and its positions are called."""

    def __post_init__(self) -> None:
        if not self.tokens or not self.layers:
            raise InputError("A view needs at least one token and one layer; got none.")
        shape = (len(self.layers), self.magnitude.shape[1], len(self.tokens))
        for name in ("magnitude", "orientation", "target_magnitude", "target_orientation", "attended"):
            array = getattr(self, name)
            if array.shape != shape:
                raise InputError(f"`{name}` must have the shape {shape} of the tokens and layers; got {array.shape}.")
            if np.isinf(array).any():
                raise InputError(f"`{name}` must be finite, with NaN where undefined; got an infinity.")
        if self.attended.min() < -1 or self.attended.max() >= len(self.tokens):
            raise InputError(
                f"`attended` must hold positions from 0 to {len(self.tokens) - 1}, or -1 where a row has no choice; "
                f"got {self.attended.min()} to {self.attended.max()}."
            )

    def magnitude_of(self, side: Side) -> Float32[np.ndarray, "layer head token"]:
        """The update's length relative to the stream's."""
        return self.magnitude if side == "query" else self.target_magnitude

    def orientation_of(self, side: Side) -> Float32[np.ndarray, "layer head token"]:
        """The update's cosine with the stream."""
        return self.orientation if side == "query" else self.target_orientation


@dataclass(frozen=True)
class TableRow:
    """One row of a table: a name, its value, and for a check how it went and why."""

    label: str
    value: str
    status: Literal["ok", "warn", "fail"] | None = None
    detail: str = ""


def row_sentences(view: ScoreNumbers) -> ByChoice:
    """For every query in every head, the three keys that it attends to most, or that it gets most from."""
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
            return f"Of the norms ‖p f(x)‖ that this head brings to query {view.named_token(query)}: {listed}"
        return f"Query {view.named_token(query)} attends {listed}"

    if norms is None:
        return ByChoice.texts(("layer", "head", "query"), view.scores.shape[:3], sentence)
    return ByChoice.texts(("weight", "layer", "head", "query"), (2, *view.scores.shape[:3]), sentence)
