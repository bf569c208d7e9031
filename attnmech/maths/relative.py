"""Products of queries and keys with tables of relative positions: terms that depend on content and distance together.

DeBERTa (He et al. 2021, arXiv 2006.03654, eq. 4) projects an embedding of each relative position with W_K and with W_Q
and adds two products to q_i·k_j before all three are scaled:

| term | formula |
|---|---|
| `content_to_position` | q_i · K_p |
| `position_to_content` | k_j · Q_p |

with p the row of the tables for the distance i − j; large distances share rows. XLNet (Dai et al. 2019,
arXiv 1901.02860) has the first only, and in addition a bias u_p for each distance, which belongs to `position`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

RELATIVE_TERMS: Final = ("content_to_position", "position_to_content")


@dataclass(frozen=True)
class Relative:
    """The tables of one layer that multiply its queries and keys.

    >>> keys = torch.tensor([[[1.0], [10.0], [100.0]]])                              # K of distances −1, 0 and 1
    >>> relative = Relative(keys, None, torch.arange(3), 1, torch.arange(2), torch.arange(2))
    >>> relative.content_to_position(torch.tensor([[[[2.0], [3.0]]]]))[0, 0]
    tensor([[ 20.,   2.],
            [300.,  30.]])
    """

    keys: Float[Tensor, "head place d_head"] | None  # K; None without `content_to_position`
    queries: Float[Tensor, "head place d_head"] | None  # Q; None without `position_to_content`
    place: Int[Tensor, " distance"]  # the row of the tables for each distance, from the least to the largest
    zero: int  # the index of distance 0 in `place`
    query_at: Int[Tensor, " query"]  # the position of each query
    key_at: Int[Tensor, " key"]
    alone: Float[Tensor, "head place"] | None = None  # u, unscaled; None without a bias for each distance
    by_input: bool = False
    """Whether `content_to_position` uses only the part of q that comes from the input, and the bias counts as
    `position` (XLNet, where biases are not part of q).
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The terms that these tables produce."""
        tables = zip(RELATIVE_TERMS, (self.keys, self.queries), strict=True)
        return tuple(name for name, table in tables if table is not None)

    def at(self, rows: slice = slice(None)) -> Int[Tensor, "row key"]:
        """Returns the row of the tables for each pair."""
        return self.place[self.query_at[rows, None] - self.key_at + self.zero]

    def content_to_position(
        self, q: Float[Tensor, "#batch head #row d_head"], rows: slice = slice(None)
    ) -> Float[Tensor, "#batch head row key"]:
        """Returns q_i · K_p of some rows; `q` has only these rows, or is the same in all rows."""
        assert self.keys is not None
        place, products = self.at(rows), q @ self.keys.to(q).mT
        products = products.expand(-1, -1, len(place), -1)
        return products.gather(-1, place.expand(*products.shape[:2], -1, -1))

    def position_to_content(
        self, k: Float[Tensor, "#batch head #key d_head"], rows: slice = slice(None)
    ) -> Float[Tensor, "#batch head row key"]:
        """Returns k_j · Q_p of some rows; `k` has every key, or is the same at all keys."""
        return self.content_of(self.by_key(k), rows)

    def by_key(self, k: Float[Tensor, "#batch head #key d_head"]) -> Float[Tensor, "#batch head #key place"]:
        """Returns k_j · Q_p for every row of the table."""
        assert self.queries is not None
        return k @ self.queries.to(k).mT

    def content_of(
        self, by_key: Float[Tensor, "#batch head #key place"], rows: slice = slice(None)
    ) -> Float[Tensor, "#batch head row key"]:
        """Returns `position_to_content`, from the products of `by_key`."""
        place = self.at(rows).mT
        by_key = by_key.expand(-1, -1, len(place), -1)
        return by_key.gather(-1, place.expand(*by_key.shape[:2], -1, -1)).mT

    def by_distance(self, rows: slice = slice(None)) -> Float[Tensor, "1 head row key"]:
        """u_p."""
        assert self.alone is not None
        return self.alone[:, self.at(rows)][None]

    def added_to(
        self, k: Float[Tensor, "batch head key d_head"]
    ) -> Callable[[Float[Tensor, "batch head row d_head"], slice], Float[Tensor, "batch head row key"]]:
        """Returns a function of a block's q and its rows that computes everything added to the scores, unscaled.

        The part that depends on keys alone is computed once, in memory that grows with the number of keys.
        """
        by_key = None if self.queries is None else self.by_key(k)

        def added(q: Tensor, rows: slice) -> Tensor:
            parts = [] if self.keys is None else [self.content_to_position(q, rows)]
            parts += [] if by_key is None else [self.content_of(by_key, rows)]
            parts += [] if self.alone is None else [self.by_distance(rows).to(q)]
            return reduce(torch.add, parts)

        return added

    def of_places(self, here: Int[Tensor, " place"]) -> "Relative":
        """Returns the tables for some positions of a text, as queries and as keys."""
        return replace(self, query_at=self.query_at[here], key_at=self.key_at[here])

    def of_rows(self, rows: Int[Tensor, " row"]) -> "Relative":
        return replace(self, query_at=self.query_at[rows])

    def of_head(self, head: int) -> "Relative":
        """Returns the tables of one head, as if the model had only that head."""
        return self._mapped(lambda table: table[head : head + 1])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Relative":
        """Returns a copy that does not change with the model, with the tables in another precision."""
        copied = self._mapped(lambda table: table.detach().to(device, copy=True).to(dtype))
        place, query_at, key_at = (indices.to(device) for indices in (self.place, self.query_at, self.key_at))
        return replace(copied, place=place, query_at=query_at, key_at=key_at)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Relative":
        tables = (None if table is None else change(table) for table in (self.keys, self.queries, self.alone))
        keys, queries, alone = tables
        return replace(self, keys=keys, queries=queries, alone=alone)


def log_bucket(distance: int, buckets: int, largest: int) -> int:
    """Returns the bucket of a distance in DeBERTa-v2: the distance itself up to half of `buckets`, then logarithmic,
    with the farthest at `largest` − 1 (He et al. 2021, arXiv 2111.09543).

    >>> [log_bucket(distance, 8, 64) for distance in (0, 3, 4, 5, 9, 63, -63)]
    [0, 3, 4, 5, 5, 7, -7]
    """
    half = buckets // 2
    if abs(distance) <= half:
        return distance
    where = torch.log(torch.tensor(abs(distance) / half)) / torch.log(torch.tensor((largest - 1) / half))
    bucket = int(torch.ceil(where * (half - 1))) + half
    return bucket if distance > 0 else -bucket
