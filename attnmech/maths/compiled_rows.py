"""What do compiled loops over rows compute? The softmax with all that focus needs of it, and what keys receive.

A row of a few thousand keys stays in the first cache, so that its maximum, exponentials with their sums, probabilities
with the two highest, and what keys and distances receive are cheap readings of it (`row_loops.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .compiled import in_threads

NEAR: Final = 8
"""How many of a row's last keys are measured together."""

_TYPES: Final = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class MeasuredRows:
    """What was measured of each row while its softmax was computed."""

    key: Int[Tensor, "batch head row"]
    """The highest key; of equal ones, the first."""
    first: Float[Tensor, "batch head row"]
    """Its probability."""
    second: Float[Tensor, "batch head row"]
    """The next; the same if the highest is tied."""
    entropy: Float[Tensor, "batch head row"]
    distance: Float[Tensor, "batch head row"]
    """Σ_j p_ij |i − j| over the keys that are tokens."""
    near: Float[Tensor, "mass batch head row"] | None
    """On the text's first token, the row's own, the one before and the last `NEAR` keys; None if not asked for."""


@dataclass(frozen=True)
class Receivers:
    """Where a block of rows adds what its keys and their diagonals receive (`Received`)."""

    classes: Bool[Tensor, "batch class row"]
    """Which of its rows belong to each class."""
    runs: Int[Tensor, "run 3"]
    """Its keys' `neighbours`."""
    tokens: int
    """How many of its keys have diagonals."""
    by_key: Float[Tensor, "batch head class all_keys"]
    by_diagonal: Float[Tensor, "batch head class all_diagonals"]

    @classmethod
    def none(cls, batch: int, heads: int, rows: int) -> "Receivers":
        """Where nobody wants to know."""
        nothing = torch.empty(batch, heads, 0, 0, dtype=torch.float64)
        no_class, no_run = torch.empty(batch, 0, rows, dtype=torch.bool), torch.empty(0, 3, dtype=torch.int64)
        return cls(no_class, no_run, 0, nothing, nothing)


def measured_softmax(
    scores: Float[Tensor, "batch head row key"],
    sink: Float[Tensor, " head"] | None,
    rows: range,
    places: Int[Tensor, " token"],
    receivers: Receivers | None = None,
    begins: Int[Tensor, " batch"] | None = None,
) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row"] | None, MeasuredRows]:
    """The softmax of the rows at some positions; the mass of the sink; what is measured.

    `places` are the positions of its first keys, and of more that it does not have; later keys are no tokens. What
    keys and diagonals receive is added to the sums of `receivers`. `begins` are the positions of texts' first tokens,
    for keys that are all from 0 on.
    """
    from .row_loops import PRECISIONS, shared_softmax

    loop: Callable[..., None] = shared_softmax
    batch, heads, count, keys = scores.shape
    scores = scores.contiguous()
    pattern = torch.empty_like(scores)
    key = torch.empty(batch, heads, count, dtype=torch.int64)
    measured = torch.empty(9, batch, heads, count, dtype=scores.dtype)
    sinks = scores.new_zeros(heads) if sink is None else sink.to(scores)
    receivers = receivers or Receivers.none(batch, heads, count)
    fixed = (
        rows.start,
        places[:keys].to(scores.dtype).numpy(),
        (places.new_zeros(batch) if begins is None else begins).numpy(),
        NEAR,
        sink is not None,
        PRECISIONS[_TYPES[scores.dtype]],
        sinks.repeat(batch).numpy(),
        receivers.runs.numpy(),
        receivers.tokens,
        receivers.classes.contiguous().numpy(),
    )
    by_head = (scores, pattern, key, receivers.by_key, receivers.by_diagonal)
    flat = (*(each.flatten(0, 1).numpy() for each in by_head), measured.flatten(1, 2).numpy())
    in_threads(batch * heads, count * keys, loop, (*fixed, *flat))
    first, second, entropy, distance, at_sink = measured[:5]
    found = MeasuredRows(key, first, second, entropy, distance, None if begins is None else measured[5:])
    return pattern, None if sink is None else at_sink, found


def summed_by_key(
    pattern: Float[Tensor, "batch head row key"], classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class key"]:
    """Σ_i p_ij over the rows of each class."""
    from .row_loops import shared_sum_by_key

    return _summed(shared_sum_by_key, pattern, classes, pattern.shape[3])


def summed_by_diagonal(
    pattern: Float[Tensor, "batch head row key"], classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class diagonal"]:
    """Σ p_ij over each diagonal of the block, from the first key of its last row to the last key of its first."""
    from .row_loops import shared_sum_by_diagonal

    return _summed(shared_sum_by_diagonal, pattern, classes, pattern.shape[2] + pattern.shape[3] - 1)


def _summed(
    loop: Callable[..., None], pattern: Tensor, classes: Tensor, width: int
) -> Float[Tensor, "batch head class place"]:
    batch, heads = pattern.shape[:2]
    sums = pattern.new_zeros(batch, heads, classes.shape[1], width)
    flat, into = (each.contiguous().flatten(0, 1).numpy() for each in (pattern, sums))
    members = classes.contiguous().numpy()
    in_threads(batch * heads, pattern[0, 0].numel(), loop, (flat, members, into))
    return sums
