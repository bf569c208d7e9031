"""Collects, during one pass, what each source of the stream adds to the queries and keys of some cells.

Sources are the stream's writers, or directions (cf. Elhage et al. 2021). Formulas: docs/formulas.md#writers-of-a-score.

The stream x_i is the sum of the vectors that its writers add, x_i = Σ_s w_s(i). With its multipliers m frozen at their
values, a norm is linear: N(x) = Σ_s F(w_s) + β, with F(w) = m ⊙ (w − mean w) (LayerNorm) or m ⊙ w (RMSNorm). Queries
and keys are therefore also sums, and

query_key_ij = Σ_s Σ_t scale · q_s(i)·k_t(j),

where q_s and k_t are the query of F(w_s) and the key of F(w_t); β also counts as a writer. The same holds for any other
sum x_i = Σ_s w_s(i), such as one over directions, which is exact whatever their quality: x = Σ_f a_f d_f + b + rest,
where rest is what the directions leave.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import dense, shown
from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.norms import FrozenNorm
from ...maths.scores import ScoreParts
from ...model.attention.observed import RowBlock
from ...model.parts.hashes import tensors_hash
from ...model.run.hooked import HookedModel
from ...model.stack.ledger import Cells, ScoreAudit, made_of_parts

_TOGETHER_BYTES: Final = 2**24  # bytes of queries at once: enough for fast matrix products, few enough for the cache

PartsOf: TypeAlias = Callable[[RowBlock, Cells], Iterator[tuple[str, Float[Tensor, "batch position d_model"]]]]
"""The sources of a layer's `attn_in` in some cells: their labels, and parts that add up to it."""


@dataclass(frozen=True)
class SourceParts:
    """What every source adds to the queries and keys of the cells of one layer.

    Queries and keys are those that enter the score: after qk-norm and rotation, where the model has them.
    """

    layer: int
    heads: tuple[int, ...]  # the heads decomposed, in the order of the axis `head`
    sources: tuple[str, ...]  # the writers in the order in which they write, or the directions, along the axis `source`
    scale: float
    query: Float[Tensor, "batch head cell source d_head"]
    key: Float[Tensor, "batch head cell source d_head"]
    mean_key: Float[Tensor, "batch head cell source d_head"]  # what each source adds to the mean key that the row sees
    query_at: Int[Tensor, " cell"]
    key_at: Int[Tensor, "batch head cell"]  # the cell's key; −1 at padding, or where the row does not see the key
    keys_seen: Int[Tensor, "batch cell"]  # the number of keys that the cell's row sees
    preference: Float[Tensor, "batch head cell"]  # the cell's score minus the mean score over keys that its row sees
    others: Mapping[str, Float[Tensor, "batch head cell"]] = field(default_factory=dict)
    """What each other term of the score adds to `preference`; empty in files of older versions."""

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        return {"head": len(self.heads), "source": len(self.sources)}

    def pairs(
        self, place: int, cells: Bool[Tensor, "batch cell"], *, contrast: bool
    ) -> Float[Tensor, "source_q source_k"]:
        """Returns what each pair of sources adds to the score of the head at index `place`, averaged over cells."""
        query, key = self.query[:, place][cells], self.key[:, place][cells]
        return pair_terms(query, key - self.mean_key[:, place][cells] if contrast else key, self.scale)

    def with_choice(self, place: int) -> Bool[Tensor, "batch cell"]:
        """A head's cells in rows that see more than one key."""
        return (self.key_at[:, place] >= 0) & (self.keys_seen > 1)


class SourceWalk:
    """Decomposes layers as the model runs: reads rows as they arrive, and the sources after a layer's last row."""

    def __init__(
        self,
        model: HookedModel,
        batch: Batch,
        chosen: Mapping[int, tuple[int, ...]],
        places: list[tuple[int, int]] | None,
        parts_of: PartsOf,
    ) -> None:
        self._model, self._batch, self._chosen = model, batch, chosen
        length, device = batch.ids.shape[1], model.device
        cells = [(row, -1) for row in range(length)] if places is None else places
        self._query_at, keys = torch.tensor(cells, device=device).unbind(dim=1)
        self._key_at = None if places is None else keys
        self._parts_of = parts_of
        self._audit: ScoreAudit | None = None
        self._rows: list[dict[str, Tensor]] = []
        """For each block of rows, the cells' keys, and by what their scores and terms exceed the row's mean."""
        self.parts: dict[int, SourceParts] = {}
        self.residual: dict[int, Float[Tensor, " head"]] = {}

    def __call__(self, block: RowBlock) -> None:
        if block.rows.start == 0:
            visible = block.mask.visible(range(block.mask.queries))
            self._audit, self._rows = ScoreAudit(self._model.stacks, block, block["attn_in"], visible), []
        assert self._audit is not None
        self._audit.add(block)
        self._rows.append(self._read(block, self._audit.parts))
        if block.rows.stop == block.mask.queries:
            self._audit.require_exact(self._chosen[block.layer])
            self._finish(block, self._audit)

    def _read(self, block: RowBlock, ledger: ScoreParts) -> dict[str, Tensor]:
        start, stop = block.rows.start, block.rows.stop
        scores = block.scores.to(ledger.query_from_input.dtype)
        keep, width = block.visible & block.real[:, None, :, None], scores.shape[-1]
        here = (self._query_at >= start) & (self._query_at < stop)
        rows, heads = self._query_at[here] - start, list(self._chosen[block.layer])
        row, seen = scores[:, heads][:, :, rows], keep[:, :, rows]
        if self._key_at is None:
            key = row.masked_fill(~seen, -torch.inf).argmax(dim=-1)
        else:
            key = self._key_at[here].expand(*row.shape[:3])
        # Beyond the block's width no row sees a key.
        inside = key.clamp(max=width - 1)
        valid = (key < width) & seen.expand_as(row).gather(-1, inside[..., None])[..., 0]

        def above_mean(values: Float[Tensor, "batch head cell key"]) -> Float[Tensor, "batch head cell"]:
            mean = values.masked_fill(~seen, 0.0).sum(dim=-1) / seen.sum(dim=-1).clamp_min(1)
            return values.gather(-1, inside[..., None])[..., 0].sub(mean).masked_fill(~valid, torch.nan)

        cells = {"key_at": key.masked_fill(~valid, -1), "preference": above_mean(row)}
        for name in ledger.names_along_row():
            if name != "query_key":
                term = ledger.term(name, slice(start, stop))[..., :width].expand_as(scores)
                cells[name] = above_mean(term[:, heads][:, :, rows])
        return cells

    def _finish(self, block: RowBlock, audit: ScoreAudit) -> None:
        others = {name: torch.cat([rows[name] for rows in self._rows], dim=-1) for name in self._rows[0]}
        key_at, preference = (others.pop(name) for name in ("key_at", "preference"))
        cells, ledger = Cells(self._chosen[block.layer], self._query_at, key_at), audit.parts
        seen = (ledger.visible & self._batch.mask[:, None, :, None])[:, :, cells.query_at]
        keys_seen = seen.sum(dim=-1)
        average = seen.to(ledger.query_from_input.dtype) / keys_seen.clamp_min(1)[..., None]
        labels: list[str] = []
        at_cells = []
        written = torch.zeros_like(block.values["attn_in", block.layer][..., 0], dtype=average.dtype)
        sources = self._parts_of(block, cells)
        together = max(1, _TOGETHER_BYTES // ledger.query_from_input.nbytes)
        while some := list(islice(sources, together)):
            labels += [label for label, _ in some]
            parts = torch.stack([part for _, part in some])
            written += torch.linalg.vector_norm(parts, dim=-1).sum(dim=0)
            at_cells.append(self._at_cells(block, parts, cells, average))
        query, key, mean_key = (torch.cat(written_parts, dim=3) for written_parts in zip(*at_cells, strict=True))
        self.residual[block.layer] = audit.require_sources(query.sum(dim=3), key.sum(dim=3), cells, written)
        self.parts[block.layer] = SourceParts(
            layer=block.layer,
            heads=cells.heads,
            sources=tuple(labels),
            scale=ledger.scale,
            query=query,
            key=key,
            mean_key=mean_key,
            query_at=cells.query_at,
            key_at=key_at,
            keys_seen=keys_seen[:, 0],
            preference=preference,
            others=others,
        )

    def _at_cells(
        self,
        block: RowBlock,
        parts: Float[Tensor, "source batch position d_model"],
        cells: Cells,
        average: Float[Tensor, "batch 1 cell key"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what sources add to the cells' queries, keys and mean keys, all `[batch head cell source d_head]`."""
        query, key = (
            rearrange(made, "source batch head position d_head -> batch head position source d_head")
            for made in made_of_parts(self._model.stack(), block.layer, block.notes, parts)
        )
        by_key = rearrange(key[:, list(cells.heads)], "batch head key source d_head -> batch head key (source d_head)")
        mean_key = rearrange(average @ by_key, "... (source d_head) -> ... source d_head", source=len(parts))
        return cells.of_queries(query), cells.of_keys(key), mean_key


def pair_terms(
    query: Float[Tensor, "cell source_q d_head"], key: Float[Tensor, "cell source_k d_head"], scale: float
) -> Float[Tensor, "source_q source_k"]:
    """Returns scale · q_s·k_t for every pair of sources, averaged over cells; NaN if there are no cells.

    >>> pair_terms(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), 0.5)
    tensor([[1.5000],
            [4.0000]])
    """
    total = einsum(query, key, "cell source_q d_head, cell source_k d_head -> source_q source_k")
    return total * (scale / len(query)) if len(query) else torch.full_like(total, torch.nan)


@runtime_checkable
class Dictionary(Protocol):
    """A sparse autoencoder, as SAELens has it."""

    W_dec: Tensor  # the directions, `[feature d_model]`; a `b_dec` of `[d_model]` is added to them, if there is one

    def encode(self, x: Tensor) -> Tensor:
        """The activations `[… feature]` of a stream `[… d_model]`."""
        ...


Directions: TypeAlias = Mapping[str, Any] | Dictionary
_SHIFT: Final = "norm shift"
_RESERVED: Final = ("rest", "bias", "other features", _SHIFT)


@dataclass(frozen=True)
class StreamSplit:
    """Directions, and how strongly each is active in a stream."""

    vectors: Float[Tensor, "feature d_model"]
    bias: Float[Tensor, " d_model"] | None
    encode: Callable[[Tensor], Tensor]
    names: tuple[str, ...] | None  # the names of the directions; None for a dictionary, whose features have numbers
    description: str

    @classmethod
    def of(cls, directions: Directions, d_model: int) -> "StreamSplit":
        """Named vectors, in which the stream is projected, or a dictionary, which encodes it."""
        if isinstance(directions, Mapping):
            return _projection(directions, d_model)
        if isinstance(directions, Dictionary) and callable(directions.encode):
            return _encoding(directions, d_model)
        raise InputError(
            "`directions` must map names to vectors, or have `encode` and `W_dec` [feature d_model], as an SAE of "
            f"SAELens; got {shown(directions)}."
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the directions and the bias."""
        return tensors_hash({"vectors": self.vectors} | ({} if self.bias is None else {"bias": self.bias}))

    def parts_of(
        self,
        x: Float[Tensor, "batch position d_model"],
        norm: FrozenNorm | None,
        places: Bool[Tensor, "batch position"],
        room: Callable[[int], None],
    ) -> Iterator[tuple[str, Float[Tensor, "batch position d_model"]]]:
        """Each direction's label and its part of the norm's output; the parts add up to that output.

        Of a dictionary, the features active at one of the `places` are parts of their own, and all others are one part,
        which is 0 there. `room` raises `InputError` if this number of parts is too large.
        """
        vectors, active = self.vectors.to(x), self._activations(x)
        split = x.new_zeros(x.shape) if self.bias is None else self.bias.to(x).expand(x.shape)
        rest = x - active @ vectors - split
        others = self.names is None
        numbers = active[places].any(dim=0).nonzero()[:, 0].tolist() if others else range(len(vectors))
        room(len(numbers) + 2 + others + (self.bias is not None))
        through: Callable[[Tensor], Tensor] = (lambda part: part) if norm is None else norm
        for number in numbers:
            label = f"feature {number}" if self.names is None else self.names[number]
            yield label, through(active[..., number, None] * vectors[number])
        if others:
            active[..., numbers] = 0
            yield "other features", through(active @ vectors)
        if self.bias is not None:
            yield "bias", through(split)
        yield "rest", through(rest)
        if norm is not None and norm.shift is not None:
            yield _SHIFT, norm.shift.to(x).expand(x.shape)

    def _activations(self, x: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position feature"]:
        with torch.no_grad():
            active = self.encode(x)
        wanted = (*x.shape[:2], len(self.vectors))
        if not isinstance(active, Tensor) or active.shape != wanted:
            raise InputError(
                f"`directions.encode` must return an activation for each of the {wanted[-1]} rows of `W_dec`, "
                f"{list(wanted)}; got {shown(active)}."
            )
        if not bool(torch.isfinite(dense("what `directions.encode` returns", active)).all()):
            raise InputError("`directions.encode` must return finite activations; got NaN or infinity.")
        # A copy, since the encoder may keep its tensor.
        return active.detach().to(x, copy=True)


def _projection(directions: Mapping[str, Any], d_model: int) -> StreamSplit:
    """The orthogonal projection into the span of named vectors, by the activations of the smallest norm.

    A = X U⁺, with the unit vectors U and their pseudoinverse; directions may depend on each other.
    """
    if not directions:
        raise InputError("`directions` must hold at least one direction; got an empty mapping.")
    for name in directions:
        if not isinstance(name, str) or name in _RESERVED:
            raise InputError(
                f"names of `directions` must be strings other than {', '.join(_RESERVED)}; got {shown(name)}."
            )
    vectors = torch.stack([_vector(name, vector, d_model) for name, vector in directions.items()])
    unit = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    # Vectors computed in float32 depend on each other only up to its rounding.
    tolerance = max(unit.shape) * torch.finfo(torch.float32).eps
    rank = int(torch.linalg.matrix_rank(unit, rtol=tolerance))
    inverse = torch.linalg.pinv(unit, rtol=tolerance)
    named = f"{len(unit)} direction{'s' * (len(unit) > 1)}"
    return StreamSplit(
        vectors=unit,
        bias=None,
        encode=lambda x: as_float64(x) @ inverse.to(as_float64(x)),
        names=tuple(directions),
        description=named if rank == len(unit) else f"{named} of rank {rank} (activations of the smallest norm)",
    )


def _encoding(dictionary: Dictionary, d_model: int) -> StreamSplit:
    vectors, bias = dictionary.W_dec, getattr(dictionary, "b_dec", None)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or vectors.shape[1] != d_model or not len(vectors):
        raise InputError(f"`directions.W_dec` must be a tensor [feature, {d_model}]; got {shown(vectors)}.")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (d_model,)):
        raise InputError(f"`directions.b_dec` must be a tensor [{d_model}]; got {shown(bias)}.")
    for name, value in (("W_dec", vectors), ("b_dec", bias)):
        if value is not None:
            _finite(f"`directions.{name}`", value)
    return StreamSplit(
        vectors=vectors.detach(),
        bias=None if bias is None else bias.detach(),
        encode=lambda x: dictionary.encode(x.to(vectors)),
        names=None,
        description=f"a dictionary of {len(vectors)} features",
    )


def _vector(name: str, value: Any, d_model: int) -> Float[Tensor, " d_model"]:
    what = f"direction {name!r}"
    try:
        vector = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise InputError(f"{what} must be a vector of {d_model} numbers; got {shown(value)}.") from None
    if vector.shape != (d_model,):
        raise InputError(f"{what} must be a vector of {d_model} numbers, the width of the stream; got {shown(value)}.")
    vector = as_float64(_finite(what, vector).detach()).cpu()
    if not bool(vector.any()):
        raise InputError(f"{what} must not be zero.")
    return vector


def _finite(what: str, value: Tensor) -> Tensor:
    if dense(what, value).is_complex() or not bool(torch.isfinite(value).all()):
        raise InputError(f"{what} must hold finite real numbers; got NaN, infinity or complex numbers.")
    return value
