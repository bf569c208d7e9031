"""Measures one head's queries and keys, and turns them into points (docs/formulas.md#joint-embedding)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...batch import Batch
from ...errors import UnsupportedModelError
from ...maths.ranks import plain_correlation, rank_correlation
from ...maths.softmax import softmax_of
from ...maths.variance_shares import row_covariances
from ...model.attention.observed import RowBlock
from .distances import PairDistances, row_rank_correlation, weighted_correlation
from .formulas import ScaleAndShift, Sphere, scale_grid, scale_of_norms
from .numbers import NUMBERS
from .token_pairs import Pairs, Tokens, drawn

CURVE_PAIRS: Final = 20_000
"""The largest number of random pairs on which c is chosen; the correlation at that c is over all pairs."""

_FLAT: Final = 1e-6
"""The smallest variation over the grid at which the criterion counts as dependent on c."""


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
    fixed: Mapping[tuple[int, int], ScaleAndShift] = field(default_factory=dict)
    """For heads that are placed in an existing embedding, its scale and shift, which replace the heads' own."""


@dataclass(frozen=True)
class EmbeddedHead:
    """One head's points before projection, and its numbers over all tokens."""

    vectors: Float[Tensor, "point d"]
    """The queries of the sampled tokens, followed by their keys."""
    offset: Float[Tensor, " d"]
    norms: Float[Tensor, " point"]
    numbers: dict[str, float]
    flag: str
    """"edge" if the best c lies at an end of the grid, "flat" if the criterion does not depend on c, else ""."""
    grid: Float64[Tensor, " c"]
    curve: Float64[Tensor, " c"]


_Parts: TypeAlias = tuple[Tensor, Tensor, Tensor, dict[str, float], str, Tensor, Tensor]
"""The queries and keys of all tokens as points, and the fields of `EmbeddedHead`, but the norms."""


@dataclass(frozen=True)
class OneHead:
    """One head's queries and keys on the whole batch, with the other parts of its scores."""

    plan: Plan
    batch: Batch
    tokens: Tokens
    places: Int[Tensor, " sample"]
    """The indices of the tokens that become points."""
    block: RowBlock
    """The layer's last block of rows."""
    pairs: Pairs
    rows: Int[Tensor, " row"]
    seen: Bool[Tensor, "batch row key"]
    head: int
    q: Float[Tensor, "batch position d"]
    k: Float[Tensor, "batch position d"]

    def embedded(self, first_attention: float) -> EmbeddedHead:
        """The head's points and numbers."""
        q, k = (self.tokens.of_each(values).double() for values in (self.q, self.k))
        exact = self.plan.geometry == "exact"
        queries, keys, offset, numbers, flag, grid, curve = self._exact(q, k) if exact else self._scaled(q, k)
        norms = torch.cat((q, k)).norm(dim=-1)
        query_norm, key_norm = (float(of_kind.quantile(0.5)) for of_kind in norms.chunk(2))
        numbers |= {"query_norm": query_norm, "key_norm": key_norm, "first_attention": first_attention}
        numbers = dict.fromkeys(NUMBERS, math.nan) | numbers
        sampled = torch.cat((self.places, len(q) + self.places))
        vectors = torch.cat((queries, keys))[sampled].to(torch.float64 if exact else self.q.dtype)
        return EmbeddedHead(vectors, offset, norms[sampled].float(), numbers, flag, grid, curve)

    def _scaled(self, q: Tensor, k: Tensor) -> _Parts:
        plan, pairs = self.plan, self.pairs
        fixed = plan.fixed.get((self.block.layer, self.head))
        mean_q, mean_k = q.mean(dim=0), k.mean(dim=0)
        centred_q, centred_k = q - mean_q, k - mean_k
        inner = pairs.products(centred_q, centred_k)
        product = inner + (q @ mean_k)[pairs.query] + (centred_k @ mean_q)[pairs.key]
        if fixed is None:
            shifted = (centred_q, centred_k, inner) if plan.shift else (q, k, product)
            distances = _distances(*shifted, pairs)
            c, flag, grid, curve = self._chosen(q, k, distances, product)
            embedding, distance = ScaleAndShift.of(q, k, c, shift=plan.shift), distances.at(c)
            queries, keys = embedding.queries(q), embedding.keys(k)
        else:
            embedding, c, flag, grid = fixed, fixed.c, "", scale_grid(scale_of_norms(q, k))
            curve = torch.full_like(grid, torch.nan)
            queries, keys = embedding.queries(q), embedding.keys(k)
            distance = _distances(queries, keys, pairs.products(queries, keys), pairs).at(1.0)
        apart = float((c * mean_q - mean_k / c).norm())
        spread = ((c * centred_q).square().sum(-1).mean() + (centred_k / c).square().sum(-1).mean()).div(2).sqrt()
        every_q, every_k = embedding.queries(self.q.double()), embedding.keys(self.k.double())
        numbers = {
            **_correlations(distance, product),
            "scale": c,
            "centroid_distance": apart,
            "separation": apart / float(spread) if float(spread) > 0 else math.nan,
            "shift_share": self._shift_share(mean_q),
            "attention_change": self._attention_change(every_q, every_k, self.block.scale, self._position),
        }
        return queries, keys, embedding.offset, numbers, flag, grid, curve

    def _chosen(
        self, q: Tensor, k: Tensor, distances: PairDistances, product: Tensor
    ) -> tuple[float, str, Tensor, Tensor]:
        """Returns the chosen c, its flag, the grid, and the weighted correlation on the grid, lowest at the best c."""
        plan, middle = self.plan, scale_of_norms(q, k)
        grid = scale_grid(middle)
        if plan.scale != "auto":
            return middle if plan.scale == "norm" else float(plan.scale), "", grid, torch.full_like(grid, torch.nan)
        some = drawn(len(self.pairs), CURVE_PAIRS, [plan.seed, 1])
        part, products = distances.part(some), product[some]
        curve = torch.tensor([weighted_correlation(part.at(c), products) for c in grid.tolist()], dtype=torch.float64)
        known = curve[~curve.isnan()]
        if not len(known) or float(known.max() - known.min()) < _FLAT:
            return middle, "flat", grid, curve
        best = int(curve.nan_to_num(torch.inf).argmin())
        return float(grid[best]), "edge" if best in (0, len(grid) - 1) else "", grid, curve

    def _exact(self, q: Tensor, k: Tensor) -> _Parts:
        pairs, tokens = self.pairs, self.tokens
        slope, by_key = self._slope()
        p = tokens.of_each(by_key)
        sphere = Sphere.of(k, p, self.block.scale, slope)
        queries, keys = sphere.queries(q), sphere.keys(k, p)
        score = self.block.scale * pairs.products(q, k) + slope * p[pairs.key]
        distance = _distances(queries, keys, pairs.products(queries, keys), pairs).at(1.0)
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
        position, batch = self._position, self.batch
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

    def _shift_share(self, mean_q: Float64[Tensor, " d"]) -> float:
        """The share of q̄·k in the variance of scores along a row."""
        scores = self.q[:, self.rows].double() @ self.k.double().mT
        term = (self.k.double() @ mean_q)[:, None, None]
        shares, whole = row_covariances({"shift": term}, scores[:, None], self.seen[:, None])
        total = float(whole.sum())
        return float(shares["shift"].sum()) / total if total > 0 else math.nan

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


def _distances(q: Tensor, k: Tensor, products: Tensor, pairs: Pairs) -> PairDistances:
    queries, keys = q.square().sum(dim=-1), k.square().sum(dim=-1)
    return PairDistances(queries[pairs.query], keys[pairs.key], products)
