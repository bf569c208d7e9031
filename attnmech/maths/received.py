"""The attention that keys and distances receive, by class of row, from one block or summed over a layer.

Formulas: docs/formulas.md#attention-focus.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .float64 import as_float64, float64_device

SINK_RATE: Final = 0.3
"""ε of Sink_k^ε: a key that receives more mean attention than this is a sink of a head in a text (Gu et al. 2024)."""


@dataclass(frozen=True)
class Received:
    """The attention that each key and each distance receives from a layer's rows, by class, summed block by block.

    A block is summed in its own precision, the layer in float64.
    """

    classes: Bool[Tensor, "batch class row"]  # the rows of the layer that belong to each class
    tokens: int  # the number of keys that are tokens and have a distance to the rows; 0 in cross-attention
    by_key: Float[Tensor, "batch head class key"]
    by_diagonal: Float[Tensor, "batch head class diagonal"]
    """By j − i of row i and key j, counted from the first key of the last row."""

    @classmethod
    def nothing(cls, classes: Bool[Tensor, "batch class row"], heads: int, keys: int, tokens: int) -> "Received":
        """Returns the sums before the first block of a layer."""
        batch, kinds, rows = classes.shape
        by_key, by_diagonal = (
            torch.zeros(batch, heads, kinds, width, dtype=torch.float64, device=float64_device(classes.device))
            for width in (keys, rows + tokens - 1)
        )
        return cls(classes, tokens, by_key, by_diagonal)

    def add(self, pattern: Float[Tensor, "batch head row key"], rows: range, runs: Int[Tensor, "run 3"]) -> None:
        """Adds a block of rows; `runs` are its keys' `neighbours`."""
        classes = self.classes[:, :, rows.start : rows.stop]
        received = received_by_key(pattern, classes).to(self.by_key.device)
        for begin, end, place in runs.tolist():
            self.by_key[..., place : place + end - begin].add_(received[..., begin:end])
            if begin < (end := min(end, self.tokens)):
                far = _by_diagonal(pattern[..., begin:end], classes).to(self.by_key.device)
                shift = place + self.classes.shape[2] - rows.stop
                self.by_diagonal[..., shift : shift + far.shape[-1]].add_(far)

    @property
    def by_distance(self) -> Float[Tensor, "batch head class distance"]:
        """Returns the attention that each distance |i − j| receives, from 0 to the distance between the text's ends."""
        itself = self.classes.shape[2] - 1
        before, after = self.by_diagonal[..., : itself + 1].flip(-1), self.by_diagonal[..., itself + 1 :]
        both_ways = before.new_zeros(*before.shape[:-1], max(before.shape[-1], self.tokens))
        both_ways[..., : before.shape[-1]] = before
        both_ways[..., 1 : 1 + after.shape[-1]].add_(after)
        return both_ways


def neighbours(keys: Int[Tensor, " key"] | None, count: int) -> Int[Tensor, "run 3"]:
    """Finds the runs of neighbours among a block's keys: the indices at which a run begins and ends, and its first
    position.

    >>> neighbours(torch.tensor([0, 1, 5, 6, 7, 9]), 6).tolist()
    [[0, 2, 0], [2, 5, 5], [5, 6, 9]]
    """
    if keys is None:
        return torch.tensor([[0, count, 0]])
    apart = (keys[1:] - keys[:-1] > 1).nonzero()[:, 0] + 1
    begins = torch.cat([apart.new_zeros(1), apart])
    return torch.stack([begins, torch.cat([apart, apart.new_full((1,), len(keys))]), keys[begins]], dim=1).cpu()


def received_by_key(
    pattern: Float[Tensor, "batch head row key"], classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class key"]:
    """Computes Σ_i p_ij over the rows of each class of a block."""
    return torch.matmul(classes[:, None].to(pattern), pattern)


def received_by_distance(
    pattern: Float[Tensor, "batch head row key"],
    classes: Bool[Tensor, "batch class row"],
    rows: range,
    length: int | None = None,
) -> Float[Tensor, "batch head class distance"]:
    """Sums p_ij over the pairs at each distance |i − j|, by the class of the row; distances from 0 to the last row.

    With the `length` of the text, distances i − j from 1 − length to length − 1.
    """
    count, keys = pattern.shape[2:]
    sums = _by_diagonal(pattern, classes)
    distance = rows.start - torch.arange(1 - count, keys, device=pattern.device)
    distance = distance.abs() if length is None else distance + length - 1
    folded = sums.new_zeros(*sums.shape[:3], max(rows.stop, keys) if length is None else 2 * length - 1)
    return folded.index_add_(-1, distance, sums)


def uniform_attention(
    visible: Bool[Tensor, "batch 1 row key"], classes: Bool[Tensor, "batch class row"]
) -> tuple[Float[Tensor, "batch class key"], Float[Tensor, "batch class key"]]:
    """Computes what each key would receive from rows with uniform attention, and the number of rows that see it."""
    seen, weights = as_float64(visible[:, 0]), as_float64(classes)
    share = weights / seen.sum(dim=-1).clamp_min(1)[:, None]
    return torch.matmul(share, seen), torch.matmul(weights, seen)


def sink_sums(
    received: Float[Tensor, "layer batch head key"], seen: Float[Tensor, "layer batch key"]
) -> dict[str, Tensor]:
    """Sums over texts: in how many each key is a sink, its mean attention α_k, and in how many some row sees it.

    α_k is `received` divided by the number `seen` of rows that see key k.
    """
    rate = received / seen.clamp_min(1)[:, :, None]
    return {"sinks": (rate > SINK_RATE).sum(dim=1), "sink_rate": rate.sum(dim=1), "samples": (seen > 0).sum(dim=1)}


def _by_diagonal(
    pattern: Float[Tensor, "batch head row key"], classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class diagonal"]:
    """Sums p_ij over each diagonal of the block, from the first key of its last row to the last key of its first row.

    The rows are laid out in sequence, each preceded by one zero per row of the block. Read with a stride
    one greater than their length, row r is shifted by r places, so that pairs at the same distance are in the same
    column: the sum over a block is a matrix product, as in `received_by_key`.
    """
    batch, heads, count, keys = pattern.shape
    width = count + keys
    cells = batch * heads * count * width
    laid = pattern.new_empty(cells + count)
    laid[cells:].zero_()
    block = laid[:cells].view(batch, heads, count, width)
    block[..., :count].zero_()
    block[..., count:] = pattern
    shifted = laid.as_strided((batch * heads, count, width - 1), (count * width, width + 1, 1), 1)
    members = classes[:, None].expand(-1, heads, -1, -1).flatten(0, 1).to(pattern)
    return torch.bmm(members, shifted).view(batch, heads, -1, width - 1)
