"""Where do the rows of a block look? Indicators, masses, distances, and what each key receives (formulas §1 and §3).

All functions take a block of rows after its softmax (`Attention`); row r of the block is token `rows[r]` of its text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .compiled import compiles
from .compiled_rows import summed_by_diagonal, summed_by_key
from .softmax import Attention

STATISTICS: Final = (
    "self_top", "first_top", "previous_top", "elsewhere_top", "tied_top",
    "self_mass", "first_mass", "previous_mass", "last_mass",
    "concentration", "entropy", "normalised_entropy", "distance",
)  # fmt: skip
"""What is measured on every row, in the order of the axis `statistic`."""


@dataclass(frozen=True)
class DefinedRows:
    """What follows from the mask alone for a block's rows: the same for all heads and all layers with that mask."""

    first: Int[Tensor, " batch"]
    """Where each text begins."""
    count: Int[Tensor, "batch row"]
    """How many keys a row can see."""
    valid: Bool[Tensor, "statistic batch row"]
    """Which rows each statistic is defined on; none at padding."""

    @classmethod
    def joined(cls, blocks: Sequence["DefinedRows"]) -> "DefinedRows":
        """Those of neighbouring blocks of rows."""
        count, valid = (torch.cat([getattr(each, name) for each in blocks], dim=-1) for name in ("count", "valid"))
        return cls(blocks[0].first, count, valid)


def defined_rows(
    visible: Bool[Tensor, "batch 1 row key"],
    rows: range,
    real: Bool[Tensor, "batch row"],
    first: Int[Tensor, " batch"],
    last: int,
    aligned: bool,
    keys: Int[Tensor, " key"] | None = None,
) -> DefinedRows:
    """The rows of one block on which each statistic is defined.

    A row has a choice if it sees two or more keys; without one, the indicators, the concentration, the normalised
    entropy and the distance are undefined. The mass on a place is defined if the row sees that place, the mass on the
    last k keys if it sees others too, "elsewhere" if it sees any other key.

    `aligned` says that queries and keys are the same tokens; in cross-attention there is no self, previous or
    distance. `keys` are the positions of the keys, in order, if those are not all from 0 on.
    """
    seen = visible[:, 0]
    count = seen.sum(dim=-1)
    place = torch.arange(rows.start, rows.stop, device=seen.device)
    choice = real & (count > 1)

    def sees(key: Tensor) -> Tensor:
        at, inside = _find(key, keys, seen.shape[-1])
        return real & inside & seen.gather(-1, at.expand(len(seen), len(rows))[..., None])[..., 0]

    none = torch.zeros_like(real)
    start = sees(first[:, None])
    itself, before = (sees(place), sees(place - 1)) if aligned else (none, none)
    apart = itself.int() + (before & (place > first[:, None])).int()
    apart = apart + (start & (place > first[:, None] + 1)).int()
    recent = torch.stack([sees(place - back) for back in range(min(last, rows.stop))]).sum(dim=0)
    beyond = choice & (count > recent) if aligned else none
    by_distance = choice if aligned else none
    valid = {
        "self_top": choice & itself,
        "first_top": choice & start,
        "previous_top": choice & before,
        "elsewhere_top": choice & (count > apart) if aligned else none,
        "tied_top": choice,
        "self_mass": itself,
        "first_mass": start,
        "previous_mass": before,
        "last_mass": beyond,
        "concentration": choice,
        "entropy": real & (count > 0),
        "normalised_entropy": choice,
        "distance": by_distance,
    }
    return DefinedRows(first, count, torch.stack([valid[name] for name in STATISTICS]))


@dataclass(frozen=True)
class RowMeasures:
    """What is read of each row's attention; `row_statistics` follows from it for all rows of a layer at once."""

    key: Int[Tensor, "batch head row"]
    """The position of the highest key."""
    numbers: Float[Tensor, "measure batch head row"]
    """The highest and the second highest probability, the entropy, the mean distance; the masses on the first key of
    the text, the row's own token, the one before and the last k keys."""

    @classmethod
    def of(
        cls,
        attention: Attention,
        rows: range,
        first: Int[Tensor, " batch"],
        last: int,
        tokens: int | None = None,
        keys: Int[Tensor, " key"] | None = None,
    ) -> "RowMeasures":
        """The measures of a block of rows.

        Keys after the first `tokens` are no tokens, and have no distance. `keys` are the positions of the keys, in
        order, if those are not all from 0 on.
        """
        pattern, top = attention.pattern, attention.top
        place = torch.arange(rows.start, rows.stop, device=pattern.device)
        back = torch.arange(max(2, min(last, rows.stop)), device=pattern.device)
        # Itself, the one before, and as many more as the last keys are.
        at, inside = _find(place - back[:, None], keys, pattern.shape[-1])
        recent = pattern[:, :, place - rows.start, at].masked_fill(~inside, 0.0)
        at_first, has_first = _find(first[:, None, None], keys, pattern.shape[-1])
        first_mass = pattern.gather(-1, at_first[..., None].expand(*pattern.shape[:3], 1))[..., 0]
        numbers = [
            *(top.first, top.second, attention.entropy, mean_distance(attention, rows, tokens, keys)),
            first_mass.masked_fill(~has_first, 0.0),
            *(recent[:, :, 0], recent[:, :, 1], recent[:, :, :last].sum(dim=2)),
        ]
        return cls(top.key if keys is None else keys[top.key], torch.stack(numbers))

    @classmethod
    def joined(cls, blocks: Sequence["RowMeasures"]) -> "RowMeasures":
        """Those of neighbouring blocks of rows."""
        key = torch.cat([each.key for each in blocks], dim=-1)
        return cls(key, torch.cat([each.numbers for each in blocks], dim=-1))


def row_statistics(measures: RowMeasures, defined: DefinedRows) -> Float[Tensor, "statistic batch head row"]:
    """Every statistic of every row from the first on, 0 where it is undefined.

    The highest key is the row's own token, the first, the one before, or elsewhere; if the two highest keys are equal,
    it counts only as tied.

        mass on a place   p_ij                      concentration        p(1) − p(2), the two highest
        entropy           −Σ_j p_ij ln p_ij, nats    normalised entropy   entropy / ln(number of keys seen)
        distance          Σ_j p_ij |i − j|, tokens
    """
    first, second, entropy, distance, first_mass, self_mass, previous_mass, last_mass = measures.numbers
    place = torch.arange(first.shape[-1], device=first.device)
    tied = first == second
    tops = {
        "self_top": measures.key == place,
        "first_top": measures.key == defined.first[:, None, None],
        "previous_top": measures.key == place - 1,
    }
    elsewhere = ~(tops["self_top"] | tops["first_top"] | tops["previous_top"])
    found = {
        **{name: hit & ~tied for name, hit in tops.items()},
        "elsewhere_top": elsewhere & ~tied,
        "tied_top": tied,
        "self_mass": self_mass,
        "first_mass": first_mass,
        "previous_mass": previous_mass,
        "last_mass": last_mass,
        "concentration": first - second,
        "entropy": entropy,
        "normalised_entropy": entropy / defined.count.clamp_min(2).to(entropy.dtype).log()[:, None],
        "distance": distance,
    }
    values = torch.stack([found[name].to(entropy.dtype) for name in STATISTICS])
    return values.masked_fill(~defined.valid[:, :, None], 0.0)


def collapse_class(bos_mass: float, entropy: float) -> str:
    """The class of a head by its mean mass on the first token and its mean entropy in nats, over all rows.

    >>> collapse_class(0.97, 0.1), collapse_class(0.6, 0.1), collapse_class(0.2, 0.1), collapse_class(0.2, 0.7)
    ('dead', 'sink', 'low entropy', '')

    Source: arXiv 2603.09616.
    """
    if math.isnan(bos_mass):
        return "not measured"
    return "dead" if bos_mass > 0.95 else "sink" if bos_mass > 0.5 else "low entropy" if entropy < 0.5 else ""


def _find(key: Int[Tensor, "*places"], keys: Int[Tensor, " key"] | None, count: int) -> tuple[Tensor, Tensor]:
    """Where positions are among the `count` keys of a block, and whether they are there at all."""
    if keys is None:
        return key.clamp(0, count - 1), (key >= 0) & (key < count)
    at = torch.searchsorted(keys, key.contiguous()).clamp_max(count - 1)
    return at, keys[at] == key


def mean_distance(
    attention: Attention, rows: range, tokens: int | None = None, keys: Int[Tensor, " key"] | None = None
) -> Float[Tensor, "batch head row"]:
    """Σ_j p_ij |i − j| over the first `tokens` keys; `keys` are their positions, if those are not all from 0 on."""
    if attention.measured is not None:
        return attention.measured.distance
    pattern = attention.pattern[..., :tokens]
    place = torch.arange(rows.start, rows.stop, device=pattern.device)
    keys = torch.arange(pattern.shape[-1], device=pattern.device) if keys is None else keys
    far = (place[:, None] - keys).abs().to(pattern.dtype)
    return (pattern * far).sum(dim=-1)


def received_by_key(
    attention: Attention, classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class key"]:
    """Σ_i p_ij over the rows of each class."""
    if compiles(attention.pattern):
        return summed_by_key(attention.pattern, classes)
    return torch.matmul(classes[:, None].to(attention.pattern), attention.pattern)


def uniform_attention(
    visible: Bool[Tensor, "batch 1 row key"], classes: Bool[Tensor, "batch class row"]
) -> tuple[Float[Tensor, "batch class key"], Float[Tensor, "batch class key"]]:
    """What each key would receive if every row attended uniformly to its visible keys; and how many rows see it."""
    seen = visible[:, 0].double()
    weights = classes.double()
    share = weights / seen.sum(dim=-1).clamp_min(1)[:, None]
    return torch.matmul(share, seen), torch.matmul(weights, seen)


def received_by_distance(
    pattern: Float[Tensor, "batch head row key"],
    classes: Bool[Tensor, "batch class row"],
    rows: range,
    length: int | None = None,
    begin: int = 0,
) -> Float[Tensor, "batch head class distance"]:
    """Σ p_ij over the pairs at each distance |i − j|, by the class of the row; distances from 0 to the last row.

    With the `length` of the text, distances i − j from 1 − length to length − 1. `begin` is the position of the first
    key.
    """
    count, keys = pattern.shape[2:]
    sums = (summed_by_diagonal if compiles(pattern) else _summed_by_diagonal)(pattern, classes)
    distance = rows.start - begin - torch.arange(1 - count, keys, device=pattern.device)
    distance = distance.abs() if length is None else distance + length - 1
    folded = sums.new_zeros(*sums.shape[:3], max(rows.stop, begin + keys) if length is None else 2 * length - 1)
    return folded.index_add_(-1, distance, sums)


def _summed_by_diagonal(
    pattern: Float[Tensor, "batch head row key"], classes: Bool[Tensor, "batch class row"]
) -> Float[Tensor, "batch head class diagonal"]:
    """Σ p_ij over each diagonal of the block, from the first key of its last row to the last key of its first.

    The rows are laid out one after another, each preceded by as many zeros as the block has rows. Read with a stride
    one greater than their length, row r is shifted by r places, so that pairs at the same distance are in the same
    column: the sum over a block is a matrix product, as in `received_by_key`.
    """
    batch, heads, count, keys = pattern.shape
    width = count + keys
    cells = batch * heads * count * width
    laid = pattern.new_empty(cells + count)
    laid[cells:] = 0
    block = laid[:cells].view(batch, heads, count, width)
    block[..., :count] = 0
    block[..., count:] = pattern
    shifted = laid.as_strided((batch * heads, count, width - 1), (count * width, width + 1, 1), 1)
    members = classes[:, None].expand(-1, heads, -1, -1).flatten(0, 1).to(pattern)
    return torch.bmm(members, shifted).view(batch, heads, -1, width - 1)
