"""Where do the rows of a block look? Indicators, masses, entropies and distances (formulas §1 and §3).

All functions take a block of rows after its softmax (`Attention`); row r of the block is token `rows[r]` of its text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .softmax import Attention
from .sums_by_text import sums_by_text

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
    places: "Places",
    last: int,
    aligned: bool,
) -> DefinedRows:
    """The rows of one block on which each statistic is defined.

    A row has a choice if it sees two or more keys; without one, the indicators, the concentration, the normalised
    entropy and the distance are undefined. The mass on a place is defined if the row sees that place, the mass on the
    last k keys if it sees others too, "elsewhere" if it sees any other key.

    `aligned` says that queries and keys are the same tokens; in cross-attention there is no self, previous or
    distance.
    """
    seen = visible[:, 0]
    count = seen.sum(dim=-1)
    place = torch.arange(rows.start, rows.stop, device=seen.device)
    choice = real & (count > 1)
    sees = real[..., None] & ~places.missing[:, 0] & seen.gather(-1, places.at)
    none = torch.zeros_like(real)
    start = sees[..., 0]
    itself, before = (sees[..., 1], sees[..., 2]) if aligned else (none, none)
    apart = itself.int() + (before & (place > first[:, None])).int()
    apart = apart + (start & (place > first[:, None] + 1)).int()
    recent = sees[..., 1 : 1 + min(last, rows.stop)].sum(dim=-1)
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
class Places:
    """Where a block's rows find their own token and others among its keys: the same for all heads and layers."""

    at: Int[Tensor, "batch row place"]
    """The first key of the text, the row's own token, the one before, and as many more as the last keys are."""
    missing: Bool[Tensor, "batch 1 row place"]
    """Whether it is none of the keys."""

    @classmethod
    def of(
        cls, rows: range, first: Int[Tensor, " batch"], last: int, keys: Int[Tensor, " key"] | None, count: int
    ) -> "Places":
        """Those of a block of rows with so many keys: at the positions `keys`, or from 0 on."""
        place = torch.arange(rows.start, rows.stop, device=first.device)
        back = torch.arange(max(2, min(last, rows.stop)), device=first.device)
        wanted = (place[:, None] - back).expand(len(first), -1, -1)
        begins = first[:, None, None].expand(-1, len(rows), 1)
        at, there = _find(torch.cat([begins, wanted], dim=-1), keys, count)
        return cls(at, ~there[:, None])


@dataclass(frozen=True)
class RowMeasures:
    """What is read of each row's attention; `row_statistics` follows from it for all rows of a layer at once."""

    key: Int[Tensor, "batch head row"]
    """The position of the highest key."""
    first: Float[Tensor, "batch head row"]
    """Its probability."""
    second: Float[Tensor, "batch head row"]
    """The second highest; the same if the highest is tied."""
    entropy: Float[Tensor, "batch head row"]
    distance: Float[Tensor, "batch head row"]
    masses: Float[Tensor, "mass batch head row"]
    """On the first key of the text, the row's own token, the one before and the last k keys."""

    @classmethod
    def of(
        cls,
        attention: Attention,
        rows: range,
        places: Places,
        last: int,
        tokens: int | None = None,
        keys: Int[Tensor, " key"] | None = None,
    ) -> "RowMeasures":
        """The measures of a block of rows.

        Keys after the first `tokens` are no tokens, and have no distance. `keys` are the positions of the keys, in
        order, if those are not all from 0 on.
        """
        top, masses = attention.top, _masses(attention.pattern, places, last)
        distance = mean_distance(attention.pattern[..., :tokens], rows, keys)
        key = top.key if keys is None else keys[top.key]
        return cls(key, top.first, top.second, attention.entropy, distance, masses)

    @classmethod
    def joined(cls, blocks: Sequence["RowMeasures"]) -> "RowMeasures":
        """Those of neighbouring blocks of rows."""
        return cls(*(torch.cat([vars(each)[name] for each in blocks], dim=-1) for name in vars(blocks[0])))


def _masses(
    pattern: Float[Tensor, "batch head row key"], places: Places, last: int
) -> Float[Tensor, "mass batch head row"]:
    """`RowMeasures.masses`."""
    found = pattern.gather(-1, places.at[:, None].expand(-1, pattern.shape[1], -1, -1))
    first, *others = found.masked_fill_(places.missing, 0.0).unbind(dim=-1)
    return torch.stack([first, *others[:2], torch.stack(others[:last]).sum(dim=0)])


def statistics_by_class(
    measures: RowMeasures, defined: DefinedRows, classes: Bool[Tensor, "batch class row"]
) -> tuple[Float[Tensor, "statistic head batch row"], Float[Tensor, "statistic class head batch"]]:
    """`row_statistics`, and their sums over the rows of each class in each text."""
    values = row_statistics(measures, defined).transpose(1, 2)
    return values, sums_by_text(values, classes)


def _log_count(defined: DefinedRows, precision: torch.dtype) -> Float[Tensor, "batch row"]:
    """ln of the number of keys that a row sees, at least of two."""
    return defined.count.clamp_min(2).to(precision).log()


def row_statistics(measures: RowMeasures, defined: DefinedRows) -> Float[Tensor, "statistic batch head row"]:
    """Every statistic of every row from the first on, 0 where it is undefined.

    The highest key is the row's own token, the first, the one before, or elsewhere; if the two highest keys are equal,
    it counts only as tied.

        mass on a place   p_ij                      concentration        p(1) − p(2), the two highest
        entropy           −Σ_j p_ij ln p_ij, nats    normalised entropy   entropy / ln(number of keys seen)
        distance          Σ_j p_ij |i − j|, tokens
    """
    first_mass, self_mass, previous_mass, last_mass = measures.masses
    entropy, tied = measures.entropy, measures.first == measures.second
    place = torch.arange(entropy.shape[-1], device=entropy.device)
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
        "concentration": measures.first - measures.second,
        "entropy": entropy,
        "normalised_entropy": entropy / _log_count(defined, entropy.dtype)[:, None],
        "distance": measures.distance,
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
    pattern: Float[Tensor, "batch head row key"], rows: range, keys: Int[Tensor, " key"] | None = None
) -> Float[Tensor, "batch head row"]:
    """Σ_j p_ij |i − j|; `keys` are the positions j, if those are not all from 0 on."""
    place = torch.arange(rows.start, rows.stop, device=pattern.device, dtype=pattern.dtype)
    key = torch.arange(pattern.shape[-1], device=pattern.device) if keys is None else keys
    far = (place[:, None] - key.to(pattern.dtype)).abs_()
    distance: Tensor = torch.linalg.vecdot(pattern, far)
    return distance
