"""Statistics of where rows attend: indicators, masses, entropies and distances (docs/formulas.md#attention-focus).

All functions take a block of rows after its softmax (`Attention`); row r of the block is token `rows[r]` of its text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .softmax import Attention
from .statistic import RowStatistic, Statistics
from .sums_by_text import sums_by_text


@dataclass(frozen=True)
class DefinedRows:
    """The rows on which statistics are defined, by the mask: all heads and layers with that mask share them."""

    first: Int[Tensor, " batch"]  # the first position of each text
    count: Int[Tensor, "batch row"]  # the number of keys that a row can see
    valid: Bool[Tensor, "statistic batch row"]  # True on the rows that define a statistic; False at padding
    global_count: Int[Tensor, "batch row"] | None = None  # global tokens that a row sees, in a model with them
    start: int = 0  # the position of the first of these rows

    @property
    def statistics(self) -> Statistics[RowStatistic]:
        """The statistics of these rows, in the order of the axis `statistic`."""
        return STATISTICS if self.global_count is None else WITH_GLOBAL

    @classmethod
    def joined(cls, blocks: Sequence["DefinedRows"]) -> "DefinedRows":
        """The rows of neighbouring blocks together."""
        if len(blocks) == 1:
            return blocks[0]
        names = ("count", "valid", *(() if blocks[0].global_count is None else ("global_count",)))
        whole: dict[str, Any] = {name: torch.cat([getattr(block, name) for block in blocks], dim=-1) for name in names}
        return replace(blocks[0], **whole)


def defined_rows(
    visible: Bool[Tensor, "batch 1 row key"],
    rows: range,
    real: Bool[Tensor, "batch row"],
    first: Int[Tensor, " batch"],
    places: "Places",
    last: int,
    aligned: bool,
) -> DefinedRows:
    """Finds the rows of one block on which each statistic is defined.

    A row has a choice if it sees two or more keys; without one, the indicators, the concentration, the normalised
    entropy and the distance are undefined. The mass on a token is defined if the row sees that token, the mass on the
    last k keys if the row also sees other keys, and "elsewhere" if it sees any key besides the three tokens.

    `aligned` says that queries and keys are the same tokens; in cross-attention there is no self, previous or
    distance.
    """
    sees = SeenRows.of(visible[:, 0], rows, real, first, places, last, aligned)
    statistics = STATISTICS if sees.global_count is None else WITH_GLOBAL
    valid = torch.stack([statistic.defined(sees) for statistic in statistics.values()])
    return DefinedRows(first, sees.count, valid, sees.global_count, rows.start)


@dataclass(frozen=True)
class SeenRows:
    """The keys that each row of a block can see, from the mask."""

    real: Bool[Tensor, "batch row"]  # the rows of tokens; in other rows, the other fields are False
    count: Int[Tensor, "batch row"]  # the number of keys that a row can see
    choice: Bool[Tensor, "batch row"]  # whether the row sees two keys or more
    itself: Bool[Tensor, "batch row"]
    """Whether the row sees its own token; `first` and `previous` are the same for the first token of its text and for
    the previous token.
    """
    first: Bool[Tensor, "batch row"]
    previous: Bool[Tensor, "batch row"]
    others: Bool[Tensor, "batch row"]  # whether the row has a choice, and sees keys other than these three
    beyond: Bool[Tensor, "batch row"]  # whether the row has a choice, and sees keys before the last k
    apart: Bool[Tensor, "batch row"]  # whether the row has a choice, and keys have a distance to it
    global_count: Int[Tensor, "batch row"] | None = None  # global tokens that a row sees, in a model with them
    local: Bool[Tensor, "batch row"] | None = None
    """Whether the row is that of a local token, and sees a global token and other keys."""
    among_global: Bool[Tensor, "batch row"] | None = None  # whether the row is a global token's, and sees other keys

    @classmethod
    def of(
        cls,
        seen: Bool[Tensor, "batch row key"],
        rows: range,
        real: Bool[Tensor, "batch row"],
        begins: Int[Tensor, " batch"],
        places: "Places",
        last: int,
        aligned: bool,
    ) -> "SeenRows":
        count = seen.sum(dim=-1)
        place = torch.arange(rows.start, rows.stop, device=seen.device)
        choice = real & (count > 1)
        sees = real[..., None] & ~places.missing[:, 0] & seen.gather(-1, places.at)
        none = torch.zeros_like(real)
        itself, before = (sees[..., 1], sees[..., 2]) if aligned else (none, none)
        named = itself.int() + (before & (place > begins[:, None])).int()
        named = named + (sees[..., 0] & (place > begins[:, None] + 1)).int()
        recent = sees[..., 1 : 1 + min(last, rows.stop)].sum(dim=-1)
        others, beyond, apart = (rows_of if aligned else none for rows_of in (count > named, count > recent, choice))
        of_global: tuple[Tensor, ...] = ()
        if places.is_global is not None:
            chosen, keys = places.is_global
            global_count = (seen & keys[:, None]).sum(dim=-1)
            mixed = real & (count > global_count)
            of_global = global_count, mixed & ~chosen & (global_count > 0), mixed & chosen
        return cls(
            real, count, choice, itself, sees[..., 0], before, choice & others, choice & beyond, choice & apart,
            *of_global,
        )  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Indices of some tokens among the keys of a block, row by row; the same for all heads and layers."""

    at: Int[Tensor, "batch row place"]
    """The first token of the text, the row's own token, the token before it, and so on up to the number of last keys.
    """
    missing: Bool[Tensor, "batch 1 row place"]  # whether the token is not among the keys
    is_global: tuple[Bool[Tensor, "batch row"], Bool[Tensor, "batch key"]] | None = None
    """Which rows and which keys are global tokens; None in a model without them."""

    @classmethod
    def of(
        cls,
        rows: range,
        first: Int[Tensor, " batch"],
        last: int,
        keys: Int[Tensor, " key"] | None,
        count: int,
        is_global: Bool[Tensor, "batch position"] | None = None,
    ) -> "Places":
        """The places for a block of rows with `count` keys, at the positions `keys` or from 0 on.

        `is_global` is True at the global tokens, in a model that can have them.
        """
        place = torch.arange(rows.start, rows.stop, device=first.device)
        back = torch.arange(max(2, min(last, rows.stop)), device=first.device)
        wanted = (place[:, None] - back).expand(len(first), -1, -1)
        at, there = _find(torch.cat([first[:, None, None].expand(-1, len(rows), 1), wanted], dim=-1), keys, count)
        if is_global is None:
            return cls(at, ~there[:, None])
        of_keys = is_global[:, :count] if keys is None else is_global[:, keys]
        return cls(at, ~there[:, None], (is_global[:, rows.start : rows.stop], of_keys))


@dataclass(frozen=True)
class RowMeasures:
    """Measures of each row's attention, from which `row_statistics` computes all rows of some layers at once."""

    key: Int[Tensor, "*layers batch head row"]  # the position of the highest key
    first: Float[Tensor, "*layers batch head row"]  # the probability of the highest key
    second: Float[Tensor, "*layers batch head row"]  # the second highest probability; `first` if the highest is tied
    entropy: Float[Tensor, "*layers batch head row"]
    distance: Float[Tensor, "*layers batch head row"]
    masses: Float[Tensor, "mass *layers batch head row"]
    """The masses on the first key of the text, on the row's own token, on the previous token, and on the last k keys;
    in a model with global tokens, also those on global tokens and on all other keys.
    """

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

        Keys after the first `tokens` are not tokens and have no distance. `keys` are the positions of the keys, in
        order; by default, from 0 on.
        """
        top, pattern = attention.top, attention.pattern
        masses = pattern.gather(-1, places.at[:, None].expand(-1, pattern.shape[1], -1, -1))
        first, *others = masses.masked_fill_(places.missing, 0.0).unbind(dim=-1)
        measured = [first, *others[:2], torch.stack(others[:last]).sum(dim=0)]
        if places.is_global is not None:
            chosen = places.is_global[1][:, None, None]
            measured += [(pattern * mask).sum(dim=-1) for mask in (chosen, ~chosen)]
        distance = mean_distance(pattern[..., :tokens], rows, keys)
        key = top.key if keys is None else keys[top.key]
        return cls(key, top.first, top.second, attention.entropy, distance, torch.stack(measured))

    @classmethod
    def joined(cls, blocks: Sequence["RowMeasures"]) -> "RowMeasures":
        if len(blocks) == 1:
            return blocks[0]
        return cls(*(torch.cat([vars(block)[name] for block in blocks], dim=-1) for name in vars(blocks[0])))

    @classmethod
    def of_layers(cls, layers: Sequence["RowMeasures"]) -> "RowMeasures":
        """The rows of several layers, with an axis of layers."""
        return cls(*(torch.stack([vars(layer)[name] for layer in layers], dim=-4) for name in vars(layers[0])))


def statistics_by_class(
    measures: RowMeasures, defined: DefinedRows, classes: Bool[Tensor, "batch class row"]
) -> tuple[Float[Tensor, "statistic *layers head batch row"], Float[Tensor, "statistic class *layers head batch"]]:
    """Computes `row_statistics`, and their sums over the rows of each class in each text."""
    values = row_statistics(measures, defined).transpose(-3, -2)
    return values, sums_by_text(values, classes)


def row_statistics(measures: RowMeasures, defined: DefinedRows) -> Float[Tensor, "statistic *layers batch head row"]:
    """Every statistic of every row of some layers; 0 where it is undefined."""
    rows = FocusRows(measures, defined)
    values = torch.stack(
        [statistic.value(rows).to(measures.entropy.dtype) for statistic in defined.statistics.values()]
    )
    of_layers = (None,) * (values.ndim - 4)
    return values.masked_fill_(~defined.valid[(slice(None), *of_layers, slice(None), None)], 0.0)


@dataclass(frozen=True)
class FocusRows:
    """All rows of some layers, as the formulas of `STATISTICS` read them."""

    measures: RowMeasures
    defined: DefinedRows

    def highest(self, at: Int[Tensor, "*places"]) -> Bool[Tensor, "*layers batch head row"]:
        """Whether the highest key is at `position` and not tied."""
        return (self.measures.key == at) & self.untied

    @cached_property
    def place(self) -> Int[Tensor, " row"]:
        key = self.measures.key
        return torch.arange(self.defined.start, self.defined.start + key.shape[-1], device=key.device)

    @cached_property
    def before(self) -> Int[Tensor, " row"]:
        return self.place - 1

    @property
    def first(self) -> Int[Tensor, "batch 1 1"]:
        return self.defined.first[:, None, None]

    @cached_property
    def tied(self) -> Bool[Tensor, "*layers batch head row"]:
        """Whether the two highest probabilities are equal, so that the row counts for neither key."""
        return self.measures.first == self.measures.second

    @cached_property
    def untied(self) -> Bool[Tensor, "*layers batch head row"]:
        return ~self.tied

    @property
    def elsewhere(self) -> Bool[Tensor, "*layers batch head row"]:
        """Whether the highest key is neither the row's own token nor the first nor the previous token."""
        key = self.measures.key
        return self.untied & (key != self.place) & (key != self.first) & (key != self.before)

    @property
    def log_count(self) -> Float[Tensor, "batch 1 row"]:
        """ln of the number of keys that a row sees, or ln 2 if it sees fewer than two."""
        return self.defined.count.clamp_min(2).to(self.measures.entropy.dtype).log()[:, None]

    @property
    def global_share(self) -> Float[Tensor, "*layers batch head row"]:
        """The share of global tokens among the keys that a row sees."""
        entropy, global_count = self.measures.entropy, self.defined.global_count
        assert global_count is not None
        return (global_count.to(entropy.dtype) / self.defined.count.clamp_min(1))[:, None].expand_as(entropy)


class FocusStatistics:
    """What attention does on each row."""

    self_top = RowStatistic(
        short="itself on top",
        printed=True,
        meaning="Share of rows whose highest key is the token itself: figure 4.",
        label="rows whose highest key<br>is the token itself",
        unit="share",
        defined=lambda seen: seen.choice & seen.itself,
        value=lambda rows: rows.highest(rows.place),
    )
    first_top = RowStatistic(
        short="first on top",
        printed=True,
        meaning="Share of rows whose highest key is the first token: figure 5.",
        label="rows whose highest key<br>is the first token",
        unit="share",
        defined=lambda seen: seen.choice & seen.first,
        value=lambda rows: rows.highest(rows.first),
    )
    previous_top = RowStatistic(
        short="previous on top",
        printed=True,
        meaning="Share of rows whose highest key is the previous token.",
        label="rows whose highest key<br>is the token before",
        unit="share",
        defined=lambda seen: seen.choice & seen.previous,
        value=lambda rows: rows.highest(rows.before),
    )
    elsewhere_top = RowStatistic(
        meaning="Share of rows whose highest key is another token, among the rows that see another token.",
        label="rows whose highest key<br>is another",
        unit="share",
        defined=lambda seen: seen.others,
        value=lambda rows: rows.elsewhere,
    )
    tied_top = RowStatistic(
        meaning="Share of rows whose two highest keys are equal.",
        label="rows whose two highest<br>keys are equal",
        unit="share",
        defined=lambda seen: seen.choice,
        value=lambda rows: rows.tied,
    )
    self_mass = RowStatistic(
        meaning="Mean probability p_ii of the token itself.",
        label="mean p of<br>the token itself",
        defined=lambda seen: seen.itself,
        value=lambda rows: rows.measures.masses[1],
    )
    first_mass = RowStatistic(
        meaning="Mean probability of the first token, on rows that see it.",
        label="mean p of<br>the first token",
        defined=lambda seen: seen.first,
        value=lambda rows: rows.measures.masses[0],
    )
    previous_mass = RowStatistic(
        meaning="Mean probability of the previous token.",
        label="mean p of<br>the token before",
        defined=lambda seen: seen.previous,
        value=lambda rows: rows.measures.masses[2],
    )
    last_mass = RowStatistic(
        meaning="Mean total probability of the last `last` keys, on rows that see further keys.",
        label="mean total p<br>of the last keys",
        defined=lambda seen: seen.beyond,
        value=lambda rows: rows.measures.masses[3],
    )
    concentration = RowStatistic(
        short="p(1) − p(2)",
        printed=True,
        meaning="Mean of p(1) − p(2), the two highest probabilities: figure 6.",
        label="mean of p(1) − p(2)",
        defined=lambda seen: seen.choice,
        value=lambda rows: rows.measures.first - rows.measures.second,
    )
    entropy = RowStatistic(
        printed=True,
        meaning="Mean of −Σ_j p_ij ln p_ij, in nats.",
        label="mean entropy",
        unit="nats",
        bounds=(0.0, math.inf),
        defined=lambda seen: seen.real & (seen.count > 0),
        value=lambda rows: rows.measures.entropy,
    )
    normalised_entropy = RowStatistic(
        meaning="Mean of entropy / ln(number of keys seen): 1 where attention is uniform.",
        label="mean entropy /<br>ln(keys seen)",
        defined=lambda seen: seen.choice,
        value=lambda rows: rows.measures.entropy / rows.log_count,
    )
    distance = RowStatistic(
        printed=True,
        meaning="Mean of Σ_j p_ij |i − j|, in tokens.",
        label="mean distance",
        unit="tokens",
        bounds=(0.0, math.inf),
        defined=lambda seen: seen.apart,
        value=lambda rows: rows.measures.distance,
    )


class GlobalFocusStatistics(FocusStatistics):
    """The same, and masses on global tokens (Longformer, Beltagy et al. 2020)."""

    global_mass = RowStatistic(
        meaning="Mean attention of local tokens to the global ones.",
        label="attention of local tokens to global ones",
        defined=lambda seen: seen.local,
        value=lambda rows: rows.measures.masses[4],
    )
    window_mass = RowStatistic(
        meaning="Mean attention of local tokens to the other keys of their windows.",
        label="attention in the window",
        defined=lambda seen: seen.local,
        value=lambda rows: rows.measures.masses[5],
    )
    uniform_global_mass = RowStatistic(
        meaning="`global_mass` if every row attended uniformly to the keys that it sees.",
        defined=lambda seen: seen.local,
        value=lambda rows: rows.global_share,
    )
    among_global = RowStatistic(
        meaning="Mean attention of global tokens to global tokens.",
        defined=lambda seen: seen.among_global,
        value=lambda rows: rows.measures.masses[4],
    )


STATISTICS: Final = Statistics(FocusStatistics, RowStatistic)  # of every row, in the order of the axis `statistic`

WITH_GLOBAL: Final = Statistics(GlobalFocusStatistics, RowStatistic)  # with those of global tokens at the end


def collapse_classes(
    mass: Float[Tensor, "layer head"], entropy: Float[Tensor, "layer head"]
) -> tuple[tuple[str, ...], ...]:
    """The `collapse_class` of each head in each layer."""
    rows = zip(mass.tolist(), entropy.tolist(), strict=True)
    return tuple(tuple(map(collapse_class, *of_layer)) for of_layer in rows)


def collapse_class(bos_mass: float, entropy: float) -> str:
    """Classifies a head by its mean mass on the first token and its mean entropy in nats, over all rows.

    >>> collapse_class(0.97, 0.1), collapse_class(0.6, 0.1), collapse_class(0.2, 0.1), collapse_class(0.2, 0.7)
    ('dead', 'sink', 'low entropy', '')

    Source: arXiv 2603.09616.
    """
    if math.isnan(bos_mass):
        return "not measured"
    return "dead" if bos_mass > 0.95 else "sink" if bos_mass > 0.5 else "low entropy" if entropy < 0.5 else ""


def _find(key: Int[Tensor, "*places"], keys: Int[Tensor, " key"] | None, count: int) -> tuple[Tensor, Tensor]:
    """Finds the indices of positions among the `count` keys of a block, and whether each position is among them."""
    if keys is None:
        return key.clamp(0, count - 1), (key >= 0) & (key < count)
    at = torch.searchsorted(keys, key.contiguous()).clamp_max(count - 1)
    return at, keys[at] == key


def mean_distance(
    pattern: Float[Tensor, "batch head row key"], rows: range, keys: Int[Tensor, " key"] | None = None
) -> Float[Tensor, "batch head row"]:
    """Computes Σ_j p_ij |i − j|; `keys` are the positions j, by default from 0 on."""
    place = torch.arange(rows.start, rows.stop, device=pattern.device, dtype=pattern.dtype)
    key = torch.arange(pattern.shape[-1], device=pattern.device) if keys is None else keys
    distance: Tensor = torch.linalg.vecdot(pattern, (place[:, None] - key.to(pattern.dtype)).abs_())
    return distance
