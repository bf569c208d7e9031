"""The real tokens of a batch in one row, and the query-key pairs that a mask leaves visible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.random import Philox
from numpy.typing import NDArray
from torch import Tensor

from ...batch import Batch
from ...model.parts.mask import MaskRule

CELLS: Final = 2**21  # up to this many query-key cells, including hidden ones, every pair is used; then a sample
_ROWS_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Tokens:
    """Some real tokens of a batch in one row, text by text; pairs refer to tokens by their indices in the row."""

    text: Int[Tensor, " token"]
    position: Int[Tensor, " token"]  # positions in the batch, counting padding on the left

    @classmethod
    def of(cls, batch: Batch) -> "Tokens":
        """Takes all real tokens."""
        text, position = batch.mask.cpu().nonzero(as_tuple=True)
        return cls(text, position)

    def __len__(self) -> int:
        return len(self.text)

    def chosen(self, places: Int[Tensor, " some"]) -> "Tokens":
        """Returns the tokens at some indices."""
        return Tokens(self.text[places], self.position[places])

    def of_each(self, value: Shaped[Tensor, "batch position *axes"]) -> Shaped[Tensor, "token *axes"]:  # noqa: F821
        """Returns the value of each token."""
        return value[self.text.to(value.device), self.position.to(value.device)]

    @property
    def counts(self) -> list[int]:
        """The number of tokens in each text, up to the last text that has any."""
        return torch.bincount(self.text).tolist()


def sampled(tokens: Tokens, documents: Int[Tensor, " text"], count: int, seed: int) -> Int[Tensor, " some"]:
    """Draws the indices of `count` random tokens, or of all tokens if there are fewer, in order.

    The random bits come from Philox-4×64 (Salmon et al. 2011), keyed by the text's number, so that neither padding nor
    the order of the texts matters.
    """
    if len(tokens) <= count:
        return torch.arange(len(tokens))
    numbers = zip(documents.tolist(), tokens.counts, strict=False)
    bits = [Philox(key=[seed, document]).random_raw(number) for document, number in numbers if number]
    order = np.argsort(np.concatenate(bits), kind="stable")
    return torch.from_numpy(np.sort(order[:count]))


def drawn(total: int, count: int, seed: Sequence[int]) -> Int[Tensor, " some"]:
    """Draws `count` random whole numbers below `total`, or all of them if there are fewer, in order."""
    if total <= count:
        return torch.arange(total)
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(total, count, replace=False)))


@dataclass(frozen=True)
class Pairs:
    """Visible query-key pairs of tokens of the same text, sorted by query."""

    query: Int[Tensor, " pair"]
    key: Int[Tensor, " pair"]
    counts: tuple[int, ...]
    whole: bool  # whether these are all pairs; otherwise they are a seeded sample

    def __len__(self) -> int:
        return len(self.query)

    def products(self, q: Float[Tensor, "token d"], k: Float[Tensor, "token d"]) -> Float[Tensor, " pair"]:
        """Returns q_i · k_j of every pair."""
        if not self.whole:
            parts = zip(torch.split(self.query, 2**16), torch.split(self.key, 2**16), strict=True)
            return torch.cat([(q[query] * k[key]).sum(dim=-1) for query, key in parts])
        # numpy, because torch's threads only wait for each other on many small tables.
        queries, keys = q.numpy(), k.numpy()
        products, start = [], 0
        for count, cells in zip(self.counts, self._cells, strict=True):
            table = queries[start : start + count] @ keys[start : start + count].T
            products.append(table.ravel()[cells])
            start += count
        return torch.from_numpy(np.concatenate(products))

    @cached_property
    def _cells(self) -> list[NDArray[np.int64]]:
        """For each text, the indices of its pairs in the table of all its queries and keys."""
        query, key = self.query.numpy(), self.key.numpy()
        starts = np.cumsum([0, *self.counts])
        ends = np.searchsorted(query, starts)
        return [
            (query[first:end] - start) * count + key[first:end] - start
            for first, end, start, count in zip(ends, ends[1:], starts, self.counts, strict=False)
        ]


def visible_pairs(tokens: Tokens, mask: MaskRule, seed: int) -> Pairs:
    """Returns the pairs of these tokens that the mask leaves visible: all, or a sample (`CELLS`)."""
    counts = torch.tensor(tokens.counts)
    cells = counts.square().cumsum(0)
    whole = int(cells[-1]) <= CELLS
    if whole:
        numbers = torch.arange(int(cells[-1]))
    else:  # slightly fewer than CELLS / 2, because some are drawn twice
        picked = np.random.default_rng([seed, 0]).integers(0, int(cells[-1]), CELLS // 2)
        numbers = torch.from_numpy(np.unique(picked))
    text = torch.searchsorted(cells, numbers, right=True)
    inside, first = numbers - (cells - counts.square())[text], (counts.cumsum(0) - counts)[text]
    query, key = first + inside // counts[text], first + inside % counts[text]
    seen = _seen(tokens, mask, query, key)
    return Pairs(query[seen], key[seen], tuple(counts.tolist()), whole)


def _seen(
    tokens: Tokens, mask: MaskRule, query: Int[Tensor, " pair"], key: Int[Tensor, " pair"]
) -> Bool[Tensor, " pair"]:
    """True for pairs in which the query sees the key; the mask is evaluated a few rows at a time."""
    row, text = tokens.position[query], tokens.text[query]
    seen = torch.zeros(len(query), dtype=torch.bool)
    for start in range(0, mask.queries, _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, mask.queries))
        here = ((row >= rows.start) & (row < rows.stop)).nonzero()[:, 0]
        if len(here):
            visible = mask.visible(rows)[:, 0].cpu()
            seen[here] = visible[text[here], row[here] - start, tokens.position[key[here]]]
    return seen
