"""Which keys would a head of each type look at (docs/formulas.md#head-types)?

A type is a set of target keys for each row: the token before, an earlier copy of the row's token, the token that
followed such a copy. A row without a target does not count for that type.
"""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

OFFSETS: Final = tuple(range(2, 9))
"""How far back heads of a fixed offset are looked for, besides the token itself, the one before and the one after."""

POSITIONAL: Final = ("previous", "next", "self", *(f"{offset} back" for offset in OFFSETS), "first")
"""The types whose targets depend on positions alone."""

CONTENT: Final = ("sentence end", "comma", "special", "duplicate", "induction")
"""The types whose targets depend on which tokens stand there."""

TYPES: Final = (*POSITIONAL, *CONTENT)

ANSWERED: Final = ("duplicate", "induction")
"""The types whose targets answer with a token: the copy itself, and what followed it."""

DISTANCES: Final = {"previous": 1, "next": -1, "self": 0} | {f"{offset} back": offset for offset in OFFSETS}
"""How far back the one target of a row is, for the types of which that is all."""


def targets(
    ids: Int[Tensor, "batch position"],
    first: Bool[Tensor, "batch position"],
    marks: Mapping[str, Bool[Tensor, "batch position"]],
    rows: range,
    keys: int,
    *,
    causal: bool = True,
) -> dict[str, Bool[Tensor, "#batch row key"]]:
    """The target keys of every type, for the tokens `rows` of each text and its first `keys` tokens.

        previous, next, self, k back   j = i − 1, i + 1, i, i − k
        first                          the text's first token, unless it is the row's own
        duplicate                      t_j = t_i, j before i (in a model that looks both ways, j other than i)
        induction                      t_{j−1} = t_i, j before i; none in a model that looks both ways
        sentence end, comma, special   what `marks` says of t_j, the first and the row's own token left out

    >>> ids = torch.tensor([[7, 4, 5, 4]])
    >>> first = torch.tensor([[True, False, False, False]])
    >>> found = targets(ids, first, {}, range(3, 4), 4)
    >>> found["duplicate"].nonzero()[:, 2].tolist(), found["induction"].nonzero()[:, 2].tolist()
    ([1], [2])
    """
    query = torch.arange(rows.start, rows.stop, device=ids.device)[:, None]
    key = torch.arange(keys, device=ids.device)
    own = ids[:, rows.start : rows.stop, None]
    start = first[:, None, :keys]
    before = key < query
    found = {name: (key == query - distance)[None] for name, distance in DISTANCES.items()}
    found["first"] = start & (key != query)
    found |= {name: mark[:, None, :keys] & ~start & (key != query) for name, mark in marks.items()}
    found["duplicate"] = (ids[:, None, :keys] == own) & (before if causal else key != query)
    follows = torch.zeros_like(found["duplicate"])
    follows[..., 1:] = (ids[:, None, : keys - 1] == own) & causal
    found["induction"] = follows & before & ~start
    return found
