"""What the page shows: every number of figures 1 to 3 for one text, and the facts around them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from attnmech.errors import InputError


@dataclass(frozen=True)
class ScoreView:
    """Every number that figures 1 to 3 show for one text, for all layers and heads to choose from."""

    tokens: tuple[str, ...]
    """The text's tokens as the tokenizer gave them."""
    layers: tuple[int, ...]
    """The labels of the layers shown; heads are numbered from 0."""
    scores: Float32[np.ndarray, "layer head query key"]
    """Score before softmax; hidden cells are NaN."""
    pattern: Float32[np.ndarray, "layer head query key"]
    """Probability after softmax; 0 in hidden cells."""
    ranked_key: Int32[np.ndarray, "layer head query rank"]
    """The key of the rank-th highest score, rank 0 the highest; -1 where the row has fewer visible keys."""
    ranked_share: Mapping[str, Float32[np.ndarray, "layer head query rank"]]
    """Per term ("position", "key_bias", "query_key", …) its share of that score, 0 to 1; NaN where undefined."""
    key_terms: Mapping[str, Float32[np.ndarray, "layer head key"]]
    """The terms that depend on the key alone, in units of the score; may be empty."""
    notes: tuple[str, ...] = ()
    """Sentences that stand before the figures, such as "this model has no position term"."""

    def __post_init__(self) -> None:
        if not self.tokens or not self.layers or not self.ranked_share:
            raise InputError("A view needs at least one token, one layer and one term in `ranked_share`; got none.")
        heads, ranks = self.ranked_key.shape[1], self.ranked_key.shape[3]
        by_head = (len(self.layers), heads, len(self.tokens))
        expected = {
            "scores": (self.scores, (*by_head, len(self.tokens))),
            "pattern": (self.pattern, (*by_head, len(self.tokens))),
            "ranked_key": (self.ranked_key, (*by_head, ranks)),
            **{f"ranked_share[{name!r}]": (share, (*by_head, ranks)) for name, share in self.ranked_share.items()},
            **{f"key_terms[{name!r}]": (term, by_head) for name, term in self.key_terms.items()},
        }
        for name, (array, shape) in expected.items():
            if array.shape != shape:
                raise InputError(f"`{name}` must have the shape {shape} of the tokens and layers; got {array.shape}.")
            if np.isinf(array).any():
                raise InputError(f"`{name}` must be finite, with NaN where a cell is hidden; got an infinity.")


@dataclass(frozen=True)
class Fact:
    """One row of a table: a name, its value, and for a check how it went and why."""

    label: str
    value: str
    status: Literal["ok", "warn", "fail"] | None = None
    detail: str = ""
