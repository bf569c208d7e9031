"""Selects rows in a way that does not depend on the order in which they come (docs/formulas.md#example-rows)."""

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

NO_HASH: Final = 2**63 - 1
"""Marks a place without a row; no hash is larger."""

_FACTORS: Final = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def row_hashes(
    seed: int, layer: int, heads: int, documents: Int[Tensor, " batch"], positions: Int[Tensor, "batch row"]
) -> Int[Tensor, "batch head row"]:
    """Returns pseudo-random numbers that depend only on seed, layer, head, text and position.

    The rows with the k smallest numbers are k rows at random, in whatever order rows are read. Different rows of a head
    have different numbers, since every step is invertible. Source: the finaliser of SplitMix64 (Steele et al. 2014).

    >>> row_hashes(0, 2, 3, torch.tensor([7]), torch.tensor([[0, 1]])).shape
    torch.Size([1, 3, 2])
    """
    head = torch.arange(heads, device=positions.device)
    of_head = _mixed(_mixed(head + (layer << 20)) ^ seed)
    place = (documents.to(positions.device)[:, None] << 32) + positions
    return _mixed(of_head[:, None] ^ place[:, None])


def _mixed(value: Int[Tensor, "*places"]) -> Int[Tensor, "*places"]:
    """SplitMix64's finaliser; products wrap around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        value = (value ^ _shifted(value, shift)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: Int[Tensor, "*places"], places: int) -> Int[Tensor, "*places"]:
    """Shifts to the right and fills with zeros."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def strongest_of_groups(
    value: Float[Tensor, "*places row"], group: Int[Tensor, "*places row"], count: int
) -> Int[Tensor, "*places kept"]:
    """Returns the rows of the `count` highest values, with the highest value of each group only.

    Of equal values, the first comes first. Rows of value −∞ do not count; −1 where there are too few groups.

    >>> strongest_of_groups(torch.tensor([0.2, 0.9, 0.8, 0.9]), torch.tensor([5, 6, 5, 6]), 3)
    tensor([ 1,  2, -1])
    """
    order = value.argsort(dim=-1, descending=True, stable=True)
    ranked = group.gather(-1, order)
    by_group = ranked.argsort(dim=-1, stable=True)
    together = ranked.gather(-1, by_group)
    begins = torch.ones_like(together, dtype=torch.bool)
    begins[..., 1:] = together[..., 1:] != together[..., :-1]
    first = torch.zeros_like(begins).scatter(-1, by_group, begins) & (value.gather(-1, order) > -torch.inf)
    kept = first.byte().argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.where(first.gather(-1, kept), order.gather(-1, kept), -1)


def highest_keys(
    weights: Float[Tensor, "*places key"], count: int
) -> tuple[Int[Tensor, "*places highest"], Float[Tensor, "*places highest"]]:
    """Returns the keys of the `count` highest weights with their weights in float32; of equal weights, the first key.

    Keys of weight 0 do not count: −1 with weight 0 where there are too few.

    >>> highest_keys(torch.tensor([0.3, 0.0, 0.4, 0.3]), 4)
    (tensor([ 2,  0,  3, -1]), tensor([0.4000, 0.3000, 0.3000, 0.0000]))
    """
    # A positive float32, read as an integer, keeps its order; the key breaks ties, so that `topk` has no choice.
    bits = weights.float().contiguous().view(torch.int32).long()
    ties = torch.arange(weights.shape[-1] - 1, -1, -1, device=weights.device)
    best = ((bits << 32) + ties).topk(min(count, weights.shape[-1]), dim=-1).values
    highest = (best >> 32).int().view(torch.float32)
    keys = torch.where(highest > 0, weights.shape[-1] - 1 - (best & (2**32 - 1)), -1)
    missing = (0, count - keys.shape[-1])
    return torch.nn.functional.pad(keys, missing, value=-1), torch.nn.functional.pad(highest, missing)


def fifths(
    value: Float[Tensor, "*places sample"], rows: Int[Tensor, "*places"]
) -> tuple[Int[Tensor, "*places sample"], Float[Tensor, "*places 4"]]:
    """Returns the fifth of each row in the order of the values, 0 to 4, and the lowest values of the upper four fifths.

    The first `rows` values count; −1 for the others. Of equal values, the first is the lower. The lowest value of a
    fifth without a row is NaN.

    >>> fifths(torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7]), torch.tensor(5))
    (tensor([2, 0, 4, 1, 3]), tensor([0.3000, 0.5000, 0.7000, 0.9000]))
    """
    there = torch.arange(value.shape[-1], device=value.device) < rows[..., None]
    ordered = value.masked_fill(~there, torch.inf).sort(dim=-1, stable=True)
    rank = ordered.indices.argsort(dim=-1)
    fifth = torch.where(there, 5 * rank // rows[..., None].clamp_min(1), -1)
    begins = -(-torch.arange(1, 5, device=value.device) * rows[..., None] // 5)  # the least rank of each fifth
    lowest = ordered.values.gather(-1, begins.clamp_max(value.shape[-1] - 1))
    return fifth, lowest.masked_fill(begins >= rows[..., None], torch.nan)
