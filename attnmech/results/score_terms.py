"""Holds a decomposition of scores by term: shares at a rank, contrasts of two keys, the terms themselves."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.arguments import index_of, member, shown
from ..basics.nouns import TEXT, Nouns
from ..errors import InputError, MissingPointError
from ..maths.scores import ScoreParts
from .by_layer import table_of

MAX_TERM_BYTES: Final = 2 * 2**30  # the maximum number of bytes of a term that is built at once

ROUGH: Final = 64  # a text's own means are rough if they are over fewer tokens than this


@dataclass(frozen=True)
class Reference:
    """The means at which queries and keys are split."""

    kind: Literal["mean", "position", "fixed"]
    by_position: bool  # whether each position has its own mean; the term `position` is then not a function of distance
    tokens: tuple[int, ...]
    """For each text, the number of tokens in its own means; empty if the means are not the texts' own."""
    words: str  # the reference in words

    def note(self, sequence: int, nouns: Nouns = TEXT) -> str:
        """A sentence for figures of one text."""
        if self.kind != "mean":
            return f"Queries and keys are split at {self.words}, not at the model's biases."
        tokens = self.tokens[sequence]
        sentence = (
            f"Queries and keys are split at the {nouns.text}'s own means, not at the model's biases: over {tokens} of "
            f"its {nouns.tokens}, without the first and special ones."
        )
        if tokens >= ROUGH:
            return sentence
        return (
            f"{sentence} With so few, the split is rough: at 10 {nouns.tokens}, shares of single heads have moved by "
            "up to 0.3."
        )


class _ByTerm(Mapping[str, Tensor]):
    by_term: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        require_term(name, self.by_term)
        return self.by_term[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_term)

    def __len__(self) -> int:
        return len(self.by_term)


@dataclass(frozen=True)
class Shares(_ByTerm):
    """The shares at one rank: by term, `[batch layer head query]`, from 0 to 1, summing to 1; NaN where undefined."""

    rank: int
    layers: tuple[int, ...]
    by_term: Mapping[str, Float[Tensor, "batch layer head query"]]
    key: Int[Tensor, "batch layer head query"]
    """The key of that rank in each row; −1 where the row sees fewer keys."""


@dataclass(frozen=True)
class TermsByHead(_ByTerm):
    """One number per term and head: by term, `[layer head]`, NaN at layers that were not decomposed."""

    layers: tuple[int, ...]
    by_term: Mapping[str, Float[Tensor, "layer head"]]

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, and one column per term."""
        heads = next(iter(self.by_term.values())).shape[1]
        columns = {name: value[list(self.layers)] for name, value in self.items()}
        return table_of({"layer": self.layers, "head": range(heads)}, columns)


@dataclass(frozen=True)
class Contrast(_ByTerm):
    """Score differences between two keys: by term, `[batch layer head]`.

    NaN where a key is hidden, and at layers that were not decomposed.
    """

    query: int
    key_a: int
    key_b: int
    layers: tuple[int, ...]
    by_term: Mapping[str, Float[Tensor, "batch layer head"]]
    words: tuple[tuple[str, str, str], ...]
    """The tokens at query, key_a and key_b of every sequence."""

    @property
    def total(self) -> Float[Tensor, "batch layer head"]:
        """score(query, key_a) − score(query, key_b)."""
        return torch.stack(list(self.by_term.values())).sum(dim=0)

    def explain(self, layer: int, head: int, text: int = 0) -> str:
        """One sentence: which of the two keys is preferred, by how much, and which terms cause it."""
        layer = member("layer", layer, self.layers, "the layers decomposed")
        head = index_of("head", head, self.total.shape[2])
        text = index_of("text", text, len(self.words))
        total = float(self.total[text, layer, head])
        query, a, b = self.words[text]
        if math.isnan(total):
            return f"layer {layer} head {head}: {query!r} ({self.query}) cannot see both keys in this text"
        if total < 0:
            a, b = b, a
        sign = 1 if total >= 0 else -1
        parts = {name: sign * float(value[text, layer, head]) for name, value in self.items()}
        listed = sorted(parts.items(), key=lambda item: -abs(item[1]))
        because = ", ".join(f"{name} {value:+.2f}" for name, value in listed if value)
        places = (self.key_a, self.key_b) if total >= 0 else (self.key_b, self.key_a)
        return (
            f"layer {layer} head {head}: {query!r} ({self.query}) prefers {a!r} ({places[0]}) to {b!r} ({places[1]}) "
            f"by {abs(total):.2f}, that is {math.exp(min(abs(total), 700)):.3g} times: {because or 'no term differs'}"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per sequence and head: sequence, layer, head, one column per term, and total."""
        batch, _, heads = self.total.shape
        columns = {name: value[:, list(self.layers)] for name, value in {**self, "total": self.total}.items()}
        return table_of({"sequence": range(batch), "layer": self.layers, "head": range(heads)}, columns)


class Terms(Mapping[str, Any]):
    """The terms of a decomposition by name: `[batch layer head query key]`, with length 1 along axes on which a term
    does not depend. Computed on demand.
    """

    def __init__(self, layers: Sequence[ScoreParts]) -> None:
        self._layers = layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers[0].names())

    def __len__(self) -> int:
        return len(self._layers[0].names())

    def __getitem__(self, name: str) -> Float[Tensor, "#batch layer #head #query #key"]:
        require_term(name, tuple(self))
        layers = self._layers
        first = [parts.term(name, slice(0, 1)) for parts in layers]
        rows = layers[0].query.shape[2] if any(parts.differs_by_query(name) for parts in layers) else 1
        shape = np.broadcast_shapes(*(tuple(term.shape) for term in first))
        size = len(layers) * math.prod(shape) * rows * first[0].element_size()
        if size > MAX_TERM_BYTES:
            raise InputError(
                f"the term {name!r} of {len(layers)} layers takes {size / 2**30:.1f} GiB; at most "
                f"{MAX_TERM_BYTES / 2**30:.0f} GiB is built at once. Choose fewer layers: decompose_scores(..., "
                "layers=[0]), or .select(layers=[0]).terms[...]."
            )
        # A layer that does not rotate may lack an axis that the other layers have.
        shape = (*shape[:2], rows, shape[3])
        return torch.stack([parts.term(name).expand(shape) for parts in layers], dim=1)

    def __repr__(self) -> str:
        return f"Terms({', '.join(self)})"


def require_term(name: object, terms: Collection[str]) -> None:
    """Raises `MissingPointError`, a `KeyError`, for an unknown term."""
    if not isinstance(name, str) or name not in terms:
        raise MissingPointError(f"these scores have no term {shown(name)}; they have {', '.join(terms)}.")
