"""Sums the divergences between heads over texts in one pass.

Heads of the same layer are compared on every row. The patterns of different layers never exist at the same time, so
heads of different layers are compared on sampled rows. The patterns of these rows are stored until the batch ends. Sums
between all heads are large, so texts may be summed in fewer groups than elsewhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Philox
from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]
from scipy.spatial.distance import squareform  # type: ignore[import-untyped]
from torch import Tensor

from ...errors import InputError
from ...maths.divergence import among_heads, between_heads
from ...maths.float64 import as_float64, put
from ...maths.groups import GROUPS, by_group, joined
from ...maths.intervals import LEAST_TEXTS, TextMeans
from ...model.attention.observed import RowBlock
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.token_types import ROW_CLASSES, row_classes

KEPT_BYTES: Final = 200_000_000  # the most memory that the patterns of a batch's sampled rows may take, in bytes
SUMS_BYTES: Final = 100_000_000  # the most memory that the sums between heads of different layers may take, in bytes

STATE: Final[Mapping[str, Any]] = {
    "within": Float[Tensor, "layer pair group"],
    "counts": Float[Tensor, "layer group"],
    "between": Float[Tensor, "across head other_head group"],
    "sampled": Float[Tensor, "across group"],
    "groups": Int[Tensor, " group"],
    "modulus": Int[Tensor, " 1"],
}
"""The types of a state's entries. The axis `pair` has the pairs of heads of a layer, `across` the pairs of layers, both
in lexical order.
"""

_BY_TEXT: Final = ("within", "counts")
_ALL_BY_TEXT: Final = (*_BY_TEXT, "between", "sampled")  # the last axis is texts, or groups of texts


def axis_lengths(layers: int, heads: int, rows: int) -> dict[str, int]:
    """The lengths of the axes of a state."""
    across = math.comb(layers, 2) if rows else 0
    return {"layer": layers, "pair": math.comb(heads, 2), "across": across, "head": heads, "other_head": heads}


@dataclass(frozen=True)
class DivergenceReducer(Reducer):
    """Sums divergences by text: within each layer over all rows, and between layers over sampled rows."""

    rows: int = 64
    seed: int = 0

    def start(self, run: Run) -> State:
        """Sums of 0 for each text, the sampled rows, and empty tensors for their patterns."""
        ordinary, keys = _ordinary_rows(run), run.batch.keys(run.stack.label).ids.shape[1]
        layers, heads, texts = run.n_layers, run.n_heads, len(ordinary)
        place = sampled_rows(ordinary, run.batch.digests, self.rows if layers > 1 else 0, self.seed)
        precision = torch.promote_types(run.model.dtype, torch.float32)
        # One column besides the keys stores a sink's share.
        kept = (layers, texts, place.shape[1], heads, keys + 1)
        if (size := math.prod(kept) * precision.itemsize) > KEPT_BYTES:
            rows = place.shape[1]
            raise InputError(
                f"the patterns of {rows} sampled rows of each text of a batch would take {size / 1e6:.0f} MB; the "
                f"limit is {KEPT_BYTES // 10**6} MB. Use rows={rows * KEPT_BYTES // size}, fewer `layers`, or shorter "
                "texts; an iterator, iter(texts), runs in smaller batches than a list."
            )
        if self.rows:
            _most_groups(layers, heads)
        state = {
            "within": torch.zeros(layers, math.comb(heads, 2), texts, dtype=torch.float64),
            "counts": torch.zeros(layers, texts, dtype=torch.float64),
            "ordinary": ordinary,
            "place": place,
            "seen": torch.zeros(layers, *place.shape, dtype=torch.bool),
            "kept": torch.zeros(kept, dtype=precision),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        layer, start = block.index, block.rows.start
        counted = state["ordinary"][:, start : block.rows.stop] & (block.visible[:, 0].sum(dim=-1) >= 2)
        pattern = with_sink(block).transpose(1, 2)
        divergence = as_float64(among_heads(pattern[counted]))
        state["within"][layer].index_add_(-1, counted.nonzero()[:, 0].to(divergence.device), divergence.T)
        state["counts"][layer] += as_float64(counted.sum(dim=-1))
        here = (state["place"] >= start) & (state["place"] < block.rows.stop)
        text, sample = here.nonzero(as_tuple=True)
        row = state["place"][here] - start
        state["seen"][layer, text, sample] = counted[text, row]
        state["kept"][layer][text, sample, :, : pattern.shape[-1]] = pattern[text, row].to(state["kept"])

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts."""
        layers, heads, texts = run.n_layers, run.n_heads, len(run.documents)
        most = _most_groups(layers, heads) if self.rows else None
        kept, seen = state["kept"], state["seen"]
        between, sampled = [], []
        for one, other in combinations(range(layers if self.rows else 0), 2):
            both = seen[one] & seen[other]
            divergence = as_float64(between_heads(kept[one][both], kept[other][both]))
            text = both.nonzero()[:, 0].to(divergence.device)
            sums = divergence.new_zeros(texts, heads, heads).index_add_(0, text, divergence)
            of_two = {"between": sums.permute(1, 2, 0).cpu(), "sampled": as_float64(both.sum(dim=-1)).cpu()}
            grouped = by_group(of_two, run.batch.digests, ("between", "sampled"), most)
            between.append(grouped["between"])
            sampled.append(grouped["sampled"])
        grouped_sums = by_group({name: state[name].cpu() for name in _BY_TEXT}, run.batch.digests, _BY_TEXT, most)
        groups = len(grouped_sums["groups"])
        empty = torch.zeros(0, heads, heads, groups, dtype=torch.float64)
        return grouped_sums | {
            "between": torch.stack(between) if between else empty,
            "sampled": torch.stack(sampled) if sampled else empty[:, 0, 0],
        }

    def merge(self, one: State, other: State) -> State:
        across, heads = one["between"].shape[:2]
        most = _most_groups(len(one["within"]), heads) if across else None
        return joined(one, other, _ALL_BY_TEXT, most)


def _most_groups(layers: int, heads: int) -> int:
    """The number of groups of texts whose sums between layers fit into memory."""
    pairs = math.comb(layers, 2) * heads**2
    most = min(GROUPS, SUMS_BYTES // (8 * max(1, pairs)))
    # With more texts than groups, the number of groups is a power of two.
    if 2 ** int(math.log2(max(1, most))) < LEAST_TEXTS:
        raise InputError(
            f"{pairs} pairs of heads of different layers are too many for intervals over texts: their sums may take "
            f"at most {SUMS_BYTES // 10**6} MB. Use fewer `layers`, or rows=0, which compares heads of the same "
            "layer only."
        )
    return most


def _ordinary_rows(run: Run) -> Bool[Tensor, "batch row"]:
    return row_classes(run.batch.queries(run.stack.label))[:, ROW_CLASSES.index("ordinary")]


def sampled_rows(
    ordinary: Bool[Tensor, "batch row"], digests: Int[Tensor, " batch"], rows: int, seed: int
) -> Int[Tensor, "batch sample"]:
    """Draws the positions of `rows` ordinary rows of each text, padded with −1 for texts with fewer.

    The random bits come from Philox-4×64 (Salmon et al. 2011), keyed by the text's tokens, so that padding, the rest of
    the batch and the order of texts do not matter.
    """
    positions = []
    for members, digest in zip(ordinary.cpu(), digests.tolist(), strict=True):
        known = members.nonzero()[:, 0]
        order = np.argsort(Philox(key=[seed, digest % 2**64]).random_raw(len(known)), kind="stable")
        positions.append(known[np.sort(order[:rows])])
    return torch.nn.utils.rnn.pad_sequence(positions, batch_first=True, padding_value=-1)


def with_sink(block: RowBlock) -> Float[Tensor, "batch head row key_or_sink"]:
    """Returns the pattern after a column for the sink's share, which is 0 in layers without a sink."""
    # Layers with and without a sink are compared, so every pattern has the column.
    at_sink = block.attention.at_sink
    rest = block.pattern.new_zeros(block.pattern.shape[:-1]) if at_sink is None else at_sink
    return torch.cat((rest[..., None], block.pattern), dim=-1)


@dataclass(frozen=True, eq=False)
class Divergences:
    """The mean divergences of a state of `DivergenceReducer`; layers are numbered among the measured layers."""

    state: Mapping[str, Tensor]

    @property
    def heads(self) -> int:
        """The number of heads per layer."""
        return self.state["between"].shape[1]

    @cached_property
    def within(self) -> TextMeans:
        """The means for every pair of heads of each layer, `[layer pair]`."""
        return TextMeans.of_ratio(self.state["within"], self.state["counts"][:, None])

    @cached_property
    def everywhere(self) -> TextMeans:
        """The means for every pair of heads: first the pairs within a layer, then the pairs of different layers."""
        names = (("within", "counts"), ("between", "sampled"))
        above = [self.state[name].flatten(0, -2) for name, _ in names]
        below = [
            self.state[count].reshape(-1, *[1] * (self.state[name].ndim - 2), self.state[count].shape[-1])
            .expand_as(self.state[name]).flatten(0, -2)
            for name, count in names
        ]  # fmt: skip
        return TextMeans.of_ratio(torch.cat(above), torch.cat(below))

    def square(self, pairs: Float[Tensor, "layer pair"]) -> Float[Tensor, "layer head head"]:
        """Symmetric matrices; 0 between a head and itself if at least one row counts."""
        one, other = torch.triu_indices(self.heads, self.heads, 1)
        matrices = pairs.new_zeros(len(pairs), self.heads, self.heads)
        matrices[:, one, other] = matrices[:, other, one] = pairs
        nothing = self.state["counts"].sum(dim=-1) == 0
        return matrices.masked_fill(nothing[:, None, None], torch.nan)

    def between_all(self, pairs: Float[Tensor, " pair"]) -> Float[Tensor, "layer head layer head"]:
        """Rearranges numbers in the order of `everywhere` as an array between any two heads; NaN between layers not
        compared.
        """
        layers, in_layer = self.state["within"].shape[:2]
        own = layers * in_layer
        square = pairs.new_full((layers, self.heads, layers, self.heads), torch.nan)
        across = pairs[own:].reshape(self.state["between"].shape[:3])
        for (one, other), values in zip(combinations(range(layers), 2), across, strict=False):
            square[one, :, other], square[other, :, one] = values, values.T
        for place, values in enumerate(self.square(pairs[:own].reshape(layers, in_layer))):
            square[place, :, place] = values
        return square

    @cached_property
    def whole(self) -> Float[Tensor, "layer head layer head"]:
        """The mean divergence between any two heads."""
        return self.between_all(self.everywhere.mean)


def clustered(
    places: Sequence[tuple[int, int]], divergence: Float[Tensor, "head head"], threshold: float
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Groups of heads with a mean divergence of at most `threshold`, by average linkage, the largest group first.

    >>> clustered([(0, 0), (0, 1), (1, 0)], torch.tensor([[0.0, 0.1, 0.5], [0.1, 0.0, 0.5], [0.5, 0.5, 0.0]]), 0.2)
    (((0, 0), (0, 1)), ((1, 0),))
    """
    if len(places) == 1:
        return (tuple(places),)
    joined_at = linkage(squareform(divergence.numpy(), checks=False), method="average")
    members: dict[int, list[tuple[int, int]]] = {}
    for place, cluster in zip(places, fcluster(joined_at, threshold, criterion="distance").tolist(), strict=True):
        members.setdefault(cluster, []).append(place)
    return tuple(sorted(map(tuple, members.values()), key=lambda group: (-len(group), group)))


ROWS: Final = 8  # the number of rows of each text on which heads are compared


@dataclass(frozen=True)
class OverlapReducer(Reducer):
    """Sums Σ_j √(p_ij q_ij) over sampled rows i, for any two heads."""

    seed: int = 0

    def start(self, run: Run) -> State:
        """Sums of 0, the sampled rows, and no attention yet."""
        keys = run.batch.keys(run.stack.label).ids.shape[1]
        place = sampled_rows(_ordinary_rows(run), run.batch.digests, ROWS, self.seed)
        state = {
            "sums": torch.zeros(run.n_layers, run.n_heads, run.n_layers, run.n_heads, dtype=torch.float64),
            "rows": torch.zeros(run.n_layers, run.n_layers, dtype=torch.float64),
            "place": place,
            "seen": torch.zeros(run.n_layers, *place.shape, dtype=torch.bool),
            # One column besides the keys stores a sink's share.
            "roots": torch.zeros(run.n_layers, run.n_heads, *place.shape, keys + 1, dtype=torch.float32),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Keeps the square roots of the sampled rows of a block."""
        place = state["place"]
        text, sample = ((place >= block.rows.start) & (place < block.rows.stop)).nonzero(as_tuple=True)
        row = place[text, sample] - block.rows.start
        several = block.visible[text, 0, row].sum(dim=-1) >= 2
        pattern = with_sink(block)[text, :, row] * several[:, None, None]
        state["seen"][block.index, text, sample] = several
        state["roots"][block.index, :, text, sample, : pattern.shape[-1]] = pattern.sqrt().transpose(0, 1).float()

    def close(self, state: State, run: Run) -> State:
        """The sums over the batch's rows."""
        flat = state["roots"].flatten(2).flatten(0, 1)
        seen = as_float64(state["seen"].flatten(1))
        return {"sums": as_float64(flat @ flat.T).view_as(state["sums"]), "rows": seen @ seen.T}

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}

    def finish(self, state: State, source: Source) -> Float[Tensor, "head_of_all head_of_all"]:
        """The mean overlap of any two heads, counted layer by layer; NaN between a head and itself."""
        overlap: Tensor = (state["sums"] / state["rows"][:, None, :, None]).flatten(2).flatten(0, 1)
        return overlap.fill_diagonal_(torch.nan)
