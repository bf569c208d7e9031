"""The target keys of each type of head (docs/formulas.md#head-types).

A type assigns target keys to each row: for example the previous token, an earlier copy of the row's token, or the token
after an earlier copy. A row without a target does not count for that type.
"""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

OFFSETS: Final = tuple(range(2, 9))  # fixed offsets that are types, besides the previous, the next and the token itself

POSITIONAL: Final = ("previous", "next", "self", *(f"{offset} back" for offset in OFFSETS), "first")
"""The types whose targets depend on positions alone."""

CONTENT: Final = ("sentence end", "comma", "special", "duplicate", "induction", "media")  # targets depend on tokens
TYPES: Final = (*POSITIONAL, *CONTENT)
ANSWERED: Final = ("duplicate", "induction")  # the types whose targets predict a token: the token at the target

DISTANCES: Final = {"previous": 1, "next": -1, "self": 0} | {f"{offset} back": offset for offset in OFFSETS}
"""The distance back to the single target of a row, for the types that are defined by a distance."""


def targets(
    ids: Int[Tensor, "batch position"],
    first: Bool[Tensor, "batch position"],
    marks: Mapping[str, Bool[Tensor, "batch position"]],
    rows: range,
    keys: int,
    *,
    causal: bool = True,
) -> dict[str, Bool[Tensor, "#batch row key"]]:
    """Returns the target keys of every type, for the query tokens `rows` and the first `keys` tokens of each text.

        previous, next, self, k back   j = i − 1, i + 1, i, i − k
        first                          the text's first token, unless it is the row's own
        duplicate                      t_j = t_i, j before i (in a bidirectional model, j ≠ i)
        induction                      t_{j−1} = t_i, j before i; none in a bidirectional model
        sentence end, comma, ...       `marks` at j, without the first token and the row's own

    >>> ids = torch.tensor([[7, 4, 5, 4]])
    >>> first = torch.tensor([[True, False, False, False]])
    >>> keys_of = targets(ids, first, {}, range(3, 4), 4)
    >>> keys_of["duplicate"].nonzero()[:, 2].tolist(), keys_of["induction"].nonzero()[:, 2].tolist()
    ([1], [2])
    """
    query = torch.arange(rows.start, rows.stop, device=ids.device)[:, None]
    key = torch.arange(keys, device=ids.device)
    own = ids[:, rows.start : rows.stop, None]
    start = first[:, None, :keys]
    before = key < query
    by_type = {name: (key == query - distance)[None] for name, distance in DISTANCES.items()}
    by_type["first"] = start & (key != query)
    by_type |= {name: mark[:, None, :keys] & ~start & (key != query) for name, mark in marks.items()}
    by_type["duplicate"] = (ids[:, None, :keys] == own) & (before if causal else key != query)
    follows = torch.zeros_like(by_type["duplicate"])
    follows[..., 1:] = (ids[:, None, : keys - 1] == own) & causal
    by_type["induction"] = follows & before & ~start
    return by_type
