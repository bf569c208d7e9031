"""Selects rows in a way that does not depend on the order in which they come (docs/formulas.md#example-rows)."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Philox
from torch import Tensor
from torch.nn.functional import one_hot

NO_HASH: Final = 2**63 - 1  # marks a place without a row; no hash is larger
DIVISIONS: Final = 10_000  # random divisions into halves with which `difference_of_halves` compares the real one

RELATIONS: Final = (
    "no key", "not a token", "itself", "first token", "previous token", "next token", "same token", "2–8 back",
    "farther back", "later",
)  # fmt: skip
"""What a key can be to a query; of several that are true, the first counts."""

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
    order, first = _first_of_groups(value, group)
    kept = first_places(first, count)
    return torch.where(kept >= 0, order.gather(-1, kept.clamp_min(0)), -1)


def strongest_of_halves(
    value: Float[Tensor, "*places row"], group: Int[Tensor, "*places row"], text: Int[Tensor, "*places row"], count: int
) -> Int[Tensor, "*places kept"]:
    """Returns the rows that `strongest_of_groups` finds among texts with even numbers, and among those with odd
    numbers, of both together the highest first.

    >>> strongest_of_halves(
    ...     torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]), torch.tensor([5, 6, 5, 6, 7]), torch.tensor([0, 2, 1, 3, 5]), 2
    ... )
    tensor([0, 1, 2, 3])
    """
    order, first = _first_of_groups(value, 2 * group + text % 2)
    odd = text.gather(-1, order) % 2 == 1
    kept = torch.zeros_like(first)
    for half in (first & ~odd, first & odd):
        kept |= half & (half.cumsum(dim=-1) <= count)
    places = first_places(kept, 2 * count)
    return torch.where(places >= 0, order.gather(-1, places.clamp_min(0)), -1)


def _first_of_groups(
    value: Float[Tensor, "*places row"], group: Int[Tensor, "*places row"]
) -> tuple[Int[Tensor, "*places row"], Bool[Tensor, "*places row"]]:
    """The order of the rows, highest first, and whether each row in this order is the first of its group."""
    order = value.argsort(dim=-1, descending=True, stable=True)
    ranked = group.gather(-1, order)
    by_group = ranked.argsort(dim=-1, stable=True)
    together = ranked.gather(-1, by_group)
    begins = torch.ones_like(together, dtype=torch.bool)
    begins[..., 1:] = together[..., 1:] != together[..., :-1]
    return order, torch.zeros_like(begins).scatter(-1, by_group, begins) & (value.gather(-1, order) > -torch.inf)


def first_places(true: Bool[Tensor, "*places row"], count: int) -> Int[Tensor, "*places kept"]:
    """Returns the first `count` places that are true; −1 where there are too few.

    >>> first_places(torch.tensor([False, True, True, False]), 3)
    tensor([ 1,  2, -1])
    """
    first = true.byte().argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.where(true.gather(-1, first), first, -1)


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


def relations(
    query: Int[Tensor, "*places"],
    key: Int[Tensor, "*places"],
    query_id: Int[Tensor, "*places"],
    key_id: Int[Tensor, "*places"],
) -> Int[Tensor, "*places"]:
    """Returns the index in `RELATIONS` of what a key is to a query, from their positions in the text and their tokens.

    A key at −1 is no key, and a key with token −1 is not a token.

    >>> [RELATIONS[i] for i in relations(*torch.tensor([[7, 7, 7], [6, 0, 3], [5, 5, 5], [5, 5, 5]])).tolist()]
    ['previous token', 'first token', 'same token']
    """
    distance = query - key
    true = (
        key < 0, key_id < 0, distance == 0, key == 0, distance == 1, distance == -1,
        (query_id == key_id) & (distance > 0), (distance > 0) & (distance <= 8), distance > 0,
        torch.ones_like(key, dtype=torch.bool),
    )  # fmt: skip
    return torch.stack(true).byte().argmax(dim=0)


def difference_of_halves(
    relation: Int[Tensor, "head row"], text: Int[Tensor, "head row"], k: int
) -> tuple[Float[Tensor, "half head relation"], Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Returns how often each relation occurs among the first k rows of texts with even and with odd numbers, the total
    variation distance of these two distributions, and its p-value.

    Rows are of different texts, the strongest first; text −1 is no row. Under the null hypothesis, each text is in
    either half with probability ½, so p is the share of `DIVISIONS` random divisions, and of the real one, whose
    distance is at least as large. NaN if a half has no rows; a random division with an empty half counts as larger.

    >>> difference_of_halves(torch.tensor([[4, 4, 4, 4]]), torch.tensor([[6, 3, 2, 9]]), 10)[1:]
    (tensor([0.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    rows, there = relation.shape[1], text >= 0
    occurs = one_hot(relation.clamp_min(0).long(), len(RELATIONS)).double() * there[..., None]
    real = torch.stack([
        (half & (half.cumsum(dim=-1) <= k)).double() for half in (there & (text % 2 == number) for number in (0, 1))
    ])  # fmt: skip
    counts = torch.einsum("shr,hrn->shn", real, occurs)
    distance, empty = _total_variation(counts)
    bits = np.unpackbits(Philox(key=[0, rows]).random_raw(-(-DIVISIONS * rows // 64)).view(np.uint8))
    odd = torch.from_numpy(bits[: DIVISIONS * rows]).view(DIVISIONS, rows).bool()
    drawn = torch.stack([(half & (half.cumsum(dim=-1) <= k)).double() for half in (~odd, odd)])
    p = torch.empty_like(distance)
    for head, of_head in enumerate(occurs):
        random, undefined = _total_variation(drawn @ of_head)
        larger = (random >= distance[head] - 1e-9) | undefined
        p[head] = (larger.sum() + 1) / (DIVISIONS + 1)
    return counts, distance.masked_fill(empty, torch.nan), p.masked_fill(empty, torch.nan)


def _total_variation(
    counts: Float[Tensor, "half *places relation"],
) -> tuple[Float[Tensor, "*places"], Bool[Tensor, "*places"]]:
    """½ Σ |difference of shares| of two distributions, and whether one of them is empty."""
    rows = counts.sum(dim=-1, keepdim=True)
    shares = counts / rows.clamp_min(1)
    return (shares[0] - shares[1]).abs().sum(dim=-1) / 2, (rows == 0).any(dim=0)[..., 0]
