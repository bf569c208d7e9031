"""Measures the joint embeddings of a batch in one pass, layer by layer.

A layer's heads are measured after its last block of rows. All numbers are computed over all tokens of the batch.
Afterwards only the sampled tokens' vectors are stored, so the layer's memory is free for the next layer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float64, Int
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from ...batch import Batch
from ...errors import UnsupportedModelError
from ...maths.float64 import as_float64
from ...maths.ranks import plain_correlation, rank_correlation
from ...maths.softmax import softmax_of
from ...maths.variance_shares import row_covariances
from ...model.attention.local_global import local_half
from ...model.attention.observed import RowBlock
from ...model.parts.mask import MaskRule
from .formulas import (
    ScaleAndShift,
    Sphere,
    distances_at,
    row_rank_correlation,
    scale_grid,
    scale_of_norms,
    weighted_correlation,
)
from .numbers import NUMBERS
from .token_pairs import Pairs, Tokens, drawn, visible_pairs

CURVE_PAIRS: Final = 20_000  # the most random pairs on which c is chosen; the correlation at that c is over all pairs
_FLAT: Final = 1e-6  # the smallest variation over the grid at which the criterion counts as dependent on c


@dataclass(frozen=True)
class Plan:
    """The heads to measure, how their queries and keys become points, and how points become pictures."""

    heads: tuple[tuple[int, int], ...]
    geometry: Literal["scaled", "exact"]
    scale: float | str
    shift: bool
    seed: int
    projections: tuple[str, ...]
    dims: int
    perplexity: float
    sample: int
    bos: bool | None
    truncate: bool
    progress: bool
    fixed: Mapping[tuple[int, int], ScaleAndShift] = field(default_factory=dict)  # those of an existing embedding


@dataclass(frozen=True)
class EmbeddedHead:
    """One head's points before projection, and its numbers over all tokens."""

    vectors: Float[Tensor, "point d"]  # the queries of the sampled tokens, followed by their keys
    offset: Float[Tensor, " d"]
    norms: Float[Tensor, " point"]
    numbers: dict[str, float]
    flag: str  # "edge" if the best c lies at an end of the grid, "flat" if the criterion does not depend on c, else ""
    grid: Float64[Tensor, " c"]
    curve: Float64[Tensor, " c"]


_Parts: TypeAlias = tuple[Tensor, Tensor, Tensor, dict[str, float], str, Tensor, Tensor]
"""The queries and keys of all tokens as points, and the fields of `EmbeddedHead`, but the norms."""


@dataclass(frozen=True)
class OneHead:
    """One head's queries and keys on the whole batch, with the other parts of its scores."""

    embedder: "Embedder"
    block: RowBlock  # the layer's last block of rows
    pairs: Pairs
    rows: Int[Tensor, " row"]
    seen: Bool[Tensor, "batch row key"]
    head: int
    q: Float[Tensor, "batch position d"]
    k: Float[Tensor, "batch position d"]

    def embedded(self, first_attention: float) -> EmbeddedHead:
        """The head's points and numbers."""
        q, k = (self.embedder.tokens.of_each(values).double() for values in (self.q, self.k))
        exact = self.embedder.plan.geometry == "exact"
        queries, keys, offset, numbers, flag, grid, curve = self._exact(q, k) if exact else self._scaled(q, k)
        norms = torch.cat((q, k)).norm(dim=-1)
        query_norm, key_norm = (float(of_kind.quantile(0.5)) for of_kind in norms.chunk(2))
        numbers |= {"query_norm": query_norm, "key_norm": key_norm, "first_attention": first_attention}
        numbers = dict.fromkeys(NUMBERS, math.nan) | numbers
        sampled = torch.cat((self.embedder.places, len(q) + self.embedder.places))
        vectors = torch.cat((queries, keys))[sampled].to(torch.float64 if exact else self.q.dtype)
        return EmbeddedHead(vectors, offset, norms[sampled].float(), numbers, flag, grid, curve)

    def _scaled(self, q: Tensor, k: Tensor) -> _Parts:
        plan, pairs = self.embedder.plan, self.pairs
        fixed = plan.fixed.get((self.block.layer, self.head))
        mean_q, mean_k = q.mean(dim=0), k.mean(dim=0)
        centred_q, centred_k = q - mean_q, k - mean_k
        inner = pairs.products(centred_q, centred_k)
        product = inner + (q @ mean_k)[pairs.query] + (centred_k @ mean_q)[pairs.key]
        if fixed is None:
            shifted = (centred_q, centred_k, inner) if plan.shift else (q, k, product)
            distances = _distances(*shifted, pairs)
            c, flag, grid, curve = self._chosen(q, k, distances, product)
            embedding, distance = ScaleAndShift.of(q, k, c, shift=plan.shift), distances_at(c, *distances)
            queries, keys = embedding.queries(q), embedding.keys(k)
        else:
            embedding, c, flag, grid = fixed, fixed.c, "", scale_grid(scale_of_norms(q, k))
            curve = torch.full_like(grid, torch.nan)
            queries, keys = embedding.queries(q), embedding.keys(k)
            distance = distances_at(1.0, *_distances(queries, keys, pairs.products(queries, keys), pairs))
        apart = float((c * mean_q - mean_k / c).norm())
        spread = ((c * centred_q).square().sum(-1).mean() + (centred_k / c).square().sum(-1).mean()).div(2).sqrt()
        # The share of q̄·k in the variance of scores along a row.
        scores = self.q[:, self.rows].double() @ self.k.double().mT
        term = (self.k.double() @ mean_q)[:, None, None]
        shares, whole = row_covariances({"shift": term}, scores[:, None], self.seen[:, None])
        total = float(whole.sum())
        every_q, every_k = embedding.queries(self.q.double()), embedding.keys(self.k.double())
        numbers = {
            **_correlations(distance, product),
            "scale": c,
            "centroid_distance": apart,
            "separation": apart / float(spread) if float(spread) > 0 else math.nan,
            "shift_share": float(shares["shift"].sum()) / total if total > 0 else math.nan,
            "attention_change": self._attention_change(every_q, every_k, self.block.scale, self._position),
        }
        return queries, keys, embedding.offset, numbers, flag, grid, curve

    def _chosen(
        self, q: Tensor, k: Tensor, distances: tuple[Tensor, Tensor, Tensor], product: Tensor
    ) -> tuple[float, str, Tensor, Tensor]:
        """Returns the chosen c, its flag, the grid, and the weighted correlation on the grid, lowest at the best c."""
        plan, middle = self.embedder.plan, scale_of_norms(q, k)
        grid = scale_grid(middle)
        if plan.scale != "auto":
            return middle if plan.scale == "norm" else float(plan.scale), "", grid, torch.full_like(grid, torch.nan)
        some = drawn(len(self.pairs), CURVE_PAIRS, [plan.seed, 1])
        part, products = [values[some] for values in distances], product[some]
        at_each = [weighted_correlation(distances_at(c, *part), products) for c in grid.tolist()]
        curve = torch.tensor(at_each, dtype=torch.float64)
        known = curve[~curve.isnan()]
        if not len(known) or float(known.max() - known.min()) < _FLAT:
            return middle, "flat", grid, curve
        best = int(curve.nan_to_num(torch.inf).argmin())
        return float(grid[best]), "edge" if best in (0, len(grid) - 1) else "", grid, curve

    def _exact(self, q: Tensor, k: Tensor) -> _Parts:
        pairs = self.pairs
        slope, by_key = self._slope()
        p = self.embedder.tokens.of_each(by_key)
        sphere = Sphere.of(k, p, self.block.scale, slope)
        queries, keys = sphere.queries(q), sphere.keys(k, p)
        score = self.block.scale * pairs.products(q, k) + slope * p[pairs.key]
        distance = distances_at(1.0, *_distances(queries, keys, pairs.products(queries, keys), pairs))
        numbers = {
            **_correlations(distance, score),
            "row_spearman": row_rank_correlation(distance, score, pairs.query),
            "attention_change": self._attention_change(sphere.queries(self.q), sphere.keys(self.k, by_key), 1.0, None),
        }
        nothing = torch.full_like(scale_grid(1.0), torch.nan)
        return queries, keys, torch.zeros_like(keys[0]), numbers, "", nothing, nothing

    @property
    def _position(self) -> Float[Tensor, "#batch #row key"] | None:
        """The model's additions to q·k for positions in the measured rows: position term and products with tables."""
        position, tables, terms = self.block.position, self.block.relative, []
        if position is not None:
            own = position[:, self.head if position.shape[1] > 1 else 0].cpu().double()
            terms.append(own if own.shape[1] == 1 else own[:, self.rows])
        if tables is not None:
            one = tables.of_head(self.head).of_rows(self.rows.to(tables.place.device))
            q, k = (values.cpu().double()[:, None] for values in (self.q[:, self.rows], self.k))
            added = one.to(torch.float64, torch.device("cpu")).added_to(k)(q, slice(None))
            terms.append(self.block.scale * added[:, 0])
        return sum(terms[1:], terms[0]) if terms else None

    def _slope(self) -> tuple[float, Float64[Tensor, "batch key"]]:
        """The slope of the position term, and each key's position in the score: the term / slope.

        Raises `UnsupportedModelError` unless the term depends on the key alone, up to a constant per row.
        """
        position, batch = self._position, self.embedder.batch
        flat = torch.zeros(batch.ids.shape, dtype=torch.float64)
        if position is None:
            return 0.0, flat
        first = batch.begins.cpu()[:, None, None]
        whole = position.expand(len(flat), -1, -1)
        whole = whole - whole.gather(-1, first.expand(-1, whole.shape[1], 1))
        last = whole[:, -1]
        differs = ((whole - last[:, None]).abs() * (self.seen if whole.shape[1] > 1 else 0)).max()
        if float(differs) > 1e-5 * max(1.0, float(last.abs().max())):
            raise UnsupportedModelError(
                'geometry="exact" needs a position term that is slope · position of the key (ALiBi), or none; layer '
                f"{self.block.layer} of this model adds a term that depends on both query and key (T5's buckets, "
                'DeBERTa\'s tables). Use geometry="scaled", which embeds q·k alone.'
            )
        steps = batch.places.cpu().double() * batch.mask.cpu()
        last = last * batch.mask.cpu()
        slope = float((last * steps).sum() / steps.square().sum().clamp_min(1.0))
        return (slope, last / slope) if slope else (1.0, last)

    def _attention_change(
        self, queries: Tensor, keys: Tensor, scale: float, position: Float[Tensor, "#batch #row key"] | None
    ) -> float:
        """The largest change of an attention probability if scores are computed from the points."""
        before = self._attention(self.q.double(), self.k.double(), self.block.scale, self._position)
        after = self._attention(queries, keys, scale, position)
        real = self.seen.any(dim=-1)
        return float((after - before).abs().amax(dim=-1)[real].max())

    def _attention(
        self, queries: Tensor, keys: Tensor, scale: float, position: Tensor | None
    ) -> Float64[Tensor, "batch row key"]:
        scores = scale * (queries[:, self.rows] @ keys.mT)
        scores = scores if position is None else scores + position
        if self.block.softcap is not None:
            scores = self.block.softcap * torch.tanh(scores / self.block.softcap)
        scores = scores.masked_fill(~self.seen, torch.finfo(scores.dtype).min)
        sink = None if self.block.sink is None else self.block.sink[self.head : self.head + 1].cpu()
        return softmax_of(scores[:, None], sink)[:, 0]


def _correlations(distance: Tensor, product: Tensor) -> dict[str, float]:
    return {
        "correlation": weighted_correlation(distance, product),
        "plain_correlation": plain_correlation(distance, product),
        "spearman": rank_correlation(distance, product),
    }


def _distances(q: Tensor, k: Tensor, products: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """The squares of the pairs' queries and keys, and their products, for `distances_at`."""
    queries, keys = q.square().sum(dim=-1), k.square().sum(dim=-1)
    return queries[pairs.query], keys[pairs.key], products


Found = TypeVar("Found")


def in_threads(measure: Callable[[int], Found], count: int) -> list[Found]:
    """Returns the results of `measure` for 0, 1, …, `count` − 1, in order.

    `measure` must not change shared state or draw random numbers. Nested threads of torch would wait for one another,
    which takes three times as long on two cores.

    >>> in_threads(lambda number: number**2, 4)
    [0, 1, 4, 9]
    """
    threads = torch.get_num_threads()
    if min(threads, count) < 2:
        return [measure(number) for number in range(count)]
    try:
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads, initializer=_alone) as pool:
            return list(pool.map(measure, range(count)))
    finally:
        torch.set_num_threads(threads)  # new threads inherit this number


def _alone() -> None:
    """Limits this thread's calls to one thread; torch and OpenMP store that number per thread."""
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="openmp")


ROWS: Final = 512  # the most evenly spaced rows of a text in which `shift_share` and `attention_change` are measured


class Embedder:
    """Observes one pass over a batch (`HookedModel.forward`)."""

    def __init__(
        self, plan: Plan, batch: Batch, places: Int[Tensor, " sample"], carried: Sequence[int], stack: str
    ) -> None:
        self.plan, self.batch, self.stack = plan, batch, stack
        self.tokens, self.places = Tokens.of(batch), places  # the places among the tokens of those that become points
        self.sample = self.tokens.chosen(places)
        self.embedded: list[EmbeddedHead] = []
        self.pairs: dict[int, Pairs] = {}
        """The pairs of sampled tokens by layer."""
        self.all_pairs: dict[int, Pairs] = {}
        count = len(plan.heads)
        self.highest = torch.full((count, len(places), 2), -1, dtype=torch.long)
        self.weights = torch.zeros(count, len(places), 2)
        lengths = batch.mask.sum(dim=1).tolist()
        self.patterns = {
            text: torch.zeros(count, lengths[text], lengths[text], dtype=torch.float16) for text in carried
        }
        self.sink = False
        self._layers: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        """The queries of each block of a layer's rows, and the attention to first tokens."""

    def __call__(self, block: RowBlock) -> None:
        """Receives a block of rows; after a layer's last block, measures its heads."""
        heads = [head for layer, head in self.plan.heads if layer == block.layer]
        start = self.plan.heads.index((block.layer, heads[0]))
        places = slice(start, start + len(heads))
        self.sink = self.sink or block.sink is not None
        # Keys that are not tokens do not become points.
        pattern = block.pattern[:, heads, :, : block.mask.queries]
        self._note_highest(pattern, block, places)
        q = local_half(block.q[:, heads], block.mask).clone()
        self._layers[block.layer].append((q, self._on_first(pattern, block)))
        for text, kept in self.patterns.items():
            real = self.batch.mask[text].nonzero()[:, 0]
            rows = (real >= block.rows.start) & (real < block.rows.stop)
            keys = real[real < pattern.shape[-1]]
            chosen = pattern[text][:, real[rows] - block.rows.start][:, :, keys].to(torch.float16).cpu()
            kept[places][:, rows.cpu(), : len(keys)] = chosen
        if block.rows.stop == self.batch.ids.shape[1]:
            self._measure(heads, block)

    def _note_highest(self, pattern: Tensor, block: RowBlock, places: slice) -> None:
        """Notes the two most attended keys of the sampled queries in the block's rows, by position in the batch."""
        position = self.sample.position
        here = ((position >= block.rows.start) & (position < block.rows.stop)).nonzero()[:, 0]
        rows = pattern[self.sample.text[here], :, position[here] - block.rows.start]
        two_highest = rows.topk(min(2, rows.shape[-1]), dim=-1)
        keys = two_highest.indices.masked_fill(two_highest.values == 0, -1)
        for kept, value in ((self.highest, keys), (self.weights, two_highest.values)):
            kept[places, here, : value.shape[-1]] = rearrange(value, "token head two -> head token two").to(kept)

    def _on_first(self, pattern: Tensor, block: RowBlock) -> Float[Tensor, " head"]:
        first = self.batch.begins
        inside = first.clamp_max(pattern.shape[-1] - 1)
        on_first = pattern.gather(-1, inside[:, None, None, None].expand(*pattern.shape[:3], 1))[..., 0]
        counted = block.real & (torch.arange(block.rows.start, block.rows.stop, device=first.device) > first[:, None])
        return as_float64(on_first * counted[:, None]).sum(dim=(0, 2)).cpu()

    def _measure(self, heads: list[int], block: RowBlock) -> None:
        layer, mask = block.layer, block.mask
        queries, first = zip(*self._layers.pop(layer), strict=True)
        q = torch.cat(queries, dim=2).cpu()
        group = block.q.shape[1] // block.k.shape[1]
        k = local_half(block.k[:, [head // group for head in heads], : mask.queries], mask).cpu()
        own = id(self)  # a rule may outlive this observer
        pairs: Pairs = mask.once(("pairs", own), lambda: visible_pairs(self.tokens, mask, self.plan.seed))
        self.all_pairs[layer] = pairs
        self.pairs[layer] = mask.once(("sample", own), lambda: visible_pairs(self.sample, mask, self.plan.seed))
        rows = torch.linspace(0, mask.queries - 1, min(ROWS, mask.queries)).long()
        seen = mask.once(("rows", own), lambda: self._seen(mask, rows))
        after_first = int(self.batch.mask.sum()) - len(self.batch.ids)
        shares = (torch.stack(first).sum(dim=0).double() / (after_first or math.nan)).tolist()
        one = partial(OneHead, self, block, pairs, rows, seen)
        # Sorting, most of the work, releases the interpreter lock.
        self.embedded += in_threads(
            lambda place: one(heads[place], q[:, place], k[:, place]).embedded(shares[place]), len(heads)
        )

    def _seen(self, mask: MaskRule, rows: Int[Tensor, " row"]) -> Bool[Tensor, "batch row key"]:
        """Returns the keys that the given rows see; padding rows see none."""
        if len(rows) == mask.queries:
            visible = mask.visible(range(mask.queries))[:, 0]
        else:
            visible = torch.cat([mask.visible(range(row, row + 1))[:, 0] for row in rows.tolist()], dim=1)
        real = self.batch.mask
        return (visible[..., : mask.queries] & real[:, rows, None] & real[:, None]).cpu()
