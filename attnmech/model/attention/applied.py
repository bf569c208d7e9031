"""How do interventions change a pass? In which texts, on which cells, at which step of the attention."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ...interventions import Intervention, Values
from ...maths.scores import ScoreParts
from ...points import POINTS, PointKey, full_name
from ...results.mean_qk import MeanQK
from ..parts.mask import MaskRule
from .observed import LayerAttention

Ledger: TypeAlias = Callable[[Any, Tensor, Tensor, Batch, MeanQK | None], ScoreParts]
"""Makes the terms of a layer's scores from the layer's block, `attn_in`, the visible keys, the batch and the means."""

_IN_ATTENTION: Final = ("pattern", "scores", "v")
"""The points whose edits need more than the value at the point, but for v as a whole."""

_POSITION_AXES: Final = {"pattern": (2, 3)}
"""The axes of positions, if they are not just the second axis."""


@dataclass(frozen=True)
class Applied:
    """One intervention as applied to a model, in some texts of the running batch."""

    intervention: Intervention
    heads: Mapping[int, tuple[int, ...]]
    """The layers that it touches, each with its heads; without heads at points of the stream."""
    texts: slice = field(default_factory=lambda: slice(None))
    """The rows of the running batch that it changes."""
    source: slice | Tensor = field(default_factory=lambda: slice(None))
    """Which of the texts that the intervention's values are for are in these rows."""
    ledger: Ledger | None = None
    """The function that makes the terms, for changes to a term of the scores."""

    def values(self, layer: int, like: Tensor) -> Tensor:
        """What it puts in, in the shape, dtype and device of the values that it replaces."""
        assert self.intervention.values is not None
        point = self.intervention.point
        value = self._of_texts(self.intervention.values.by_layer[layer], len(like)).to(like)
        if point == "v" and not self.intervention.by_kv_head:
            value = value.repeat_interleave(like.shape[2] // value.shape[2], dim=2)
        for axis in _POSITION_AXES.get(point, (1,)):
            there, wanted = value.shape[axis], like.shape[axis]
            if there < wanted and (there > 1 or point == "pattern"):
                raise InputError(
                    f"{self.intervention}: its values are for {there} positions, but the text has {wanted}."
                )
            value = value.narrow(axis, 0, min(there, wanted))
        return value.expand(like.shape)

    def _of_texts(self, value: Tensor, texts: int) -> Tensor:
        chosen = value if len(value) == 1 else value[self.source]
        if len(chosen) not in (1, texts):
            raise InputError(
                f"{self.intervention}: it is made for {len(value)} texts, but {texts} run; give values for each or "
                "for one."
            )
        return chosen

    def rows(self, batch: Batch) -> Bool[Tensor, "batch position"]:
        """The rows that it changes, in the texts that it changes; `batch` has the tokens that rows stand for."""
        mask, chosen = batch.mask[self.texts], self.intervention.positions
        if chosen is None:
            return torch.ones_like(mask)
        length, shortest = mask.shape[1], int(mask.sum(dim=1).min())
        if max(chosen) >= length:
            raise InputError(f"{self.intervention}: the text has only {length} positions, counted from 0.")
        if -min(chosen) > shortest:
            raise InputError(f"{self.intervention}: a text has only {shortest} tokens, counted back from -1.")
        place = torch.arange(length, device=mask.device)
        last = (place * mask).amax(dim=1, keepdim=True)
        ahead = torch.tensor([each for each in chosen if each >= 0], device=mask.device)
        back = torch.tensor([each + 1 for each in chosen if each < 0], device=mask.device)
        return torch.isin(place, ahead) | torch.isin(place - last, back)

    def keys(self, batch: Batch) -> Bool[Tensor, "batch key"]:
        """The selected keys, in the texts that it changes."""
        wanted = self.intervention.keys
        ids, mask = batch.ids[self.texts], batch.mask[self.texts]
        place = torch.arange(ids.shape[1], device=ids.device)
        if isinstance(wanted, Values):
            chosen = self._of_texts(wanted.by_layer[0], len(ids)).to(ids.device)
            if chosen.shape[1] < ids.shape[1]:
                raise InputError(
                    f"{self.intervention}: its mask is for {chosen.shape[1]} keys, but the text has {ids.shape[1]}."
                )
            return chosen[:, : ids.shape[1]].expand(len(ids), -1)
        if wanted == "first":
            return place == mask.int().argmax(dim=1, keepdim=True)
        if wanted == "special":
            return (batch.is_special & batch.mask)[self.texts]
        assert isinstance(wanted, tuple)
        if max(wanted) >= ids.shape[1]:
            raise InputError(f"{self.intervention}: the text has only {ids.shape[1]} keys, counted from 0.")
        return torch.isin(place, torch.tensor(wanted, device=ids.device)).expand(len(ids), -1)

    def cut(self, queries: Batch, keys: Batch, rows: range, key_count: int) -> Bool[Tensor, "batch 1 row key"]:
        """The cells that a cut removes from a block of rows, in the texts that it changes."""
        assert self.intervention.spans is not None
        inside = []
        for batch, span, name in zip((queries, keys), self.intervention.spans, ("rows", "keys"), strict=True):
            mask = batch.mask[self.texts]
            shortest = int(mask.sum(dim=1).min())
            if span[1] > shortest:
                raise InputError(
                    f"{self.intervention}: its {name} reach to position {span[1] - 1}, but a text has only {shortest} "
                    "tokens, counted from 0."
                )
            place = (mask.cumsum(dim=1) - 1).masked_fill(~mask, -1)
            inside.append((place >= span[0]) & (place < span[1]))
        chosen, hidden = inside
        return (chosen[:, rows.start : rows.stop, None] & hidden[:, None, :key_count])[:, None]

    def at_point(self, value: Tensor, layer: int, batch: Batch) -> None:
        """Changes, in place, a value with the axes `batch position ...`: q, k, v, z, or the stream."""
        part = value[self.texts]
        heads = list(self.heads[layer])
        new = part.new_zeros(()).expand(part.shape) if self.intervention.values is None else self.values(layer, part)
        if self.intervention.positions is not None:
            by_key = self.intervention.by_kv_head
            tokens = (batch.keys if by_key else batch.queries)(self.intervention.stack)
            new = torch.where(self.rows(tokens).view(*part.shape[:2], *(1 for _ in part.shape[2:])), new, part)
        if heads:
            part[:, :, heads] = new[:, :, heads]
        else:
            part[:] = new


def check_values(intervention: Intervention, layers: Iterable[int], sizes: Mapping[str, int]) -> None:
    """Raises `InputError` if there are no values for a layer, or values that do not fit its axes."""
    if intervention.values is None:
        return
    given, axes = intervention.values.by_layer, POINTS[intervention.point].axes
    # Values of keys are changed per head; values from a run are the same for heads that share them.
    allowed = {} if intervention.by_kv_head else {"kv_head": (sizes["kv_head"], sizes["head"])}
    for layer in layers:
        if layer not in given:
            raise InputError(f"{intervention}: there are values for layers {sorted(given)}, but none for {layer}.")
        shape = given[layer].shape
        fits = len(shape) == len(axes) and all(
            size in allowed.get(axis, (sizes.get(axis, size),)) for axis, size in zip(axes, shape, strict=True)
        )
        if not fits:
            wanted = " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
            raise InputError(f"{intervention}: its values must be [{wanted}]; those for layer {layer} are {[*shape]}.")


@dataclass(frozen=True)
class AppliedInLayer:
    """The changes inside the attention of one layer, in the order of its steps."""

    layer: int
    scales: tuple[Applied, ...] = ()
    removals: tuple[Applied, ...] = ()
    patterns: tuple[Applied, ...] = ()
    values: tuple[Applied, ...] = ()

    @property
    def edits_pattern(self) -> bool:
        """Whether the pattern differs from the softmax of the scores."""
        return bool(self.removals or self.patterns)

    @property
    def whole_rows(self) -> bool:
        """Whether it may put weight on keys that no row of a block can see."""
        return any(change.intervention.edit == "replace" for change in self.patterns)

    def ledgers(self, of_layer: "LayerAttention", mask: "MaskRule", batch: Batch) -> dict[MeanQK | None, ScoreParts]:
        """The terms of the current scores, split as each change asks; `InputError` if they lack one to be scaled."""
        make, attn_in = self.scales[0].ledger, of_layer.notes.attn_in
        assert make is not None and attn_in is not None
        visible = mask.visible(range(mask.queries))
        centres = dict.fromkeys(change.intervention.centre for change in self.scales)
        found = {centre: make(of_layer, attn_in, visible, batch, centre) for centre in centres}
        for change in self.scales:
            names = found[change.intervention.centre].names()
            there = [name for name in names if name not in ("mask", "softcap")]
            if change.intervention.term not in there:
                raise InputError(
                    f"{change.intervention}: the scores of this model have no such term; they have {', '.join(there)}."
                )
        return found

    def on_scores(self, scores: Tensor, ledgers: Mapping[MeanQK | None, ScoreParts], rows: range) -> None:
        """Scales terms of the ledger inside scores `[batch head row key]`, in place, before a soft cap."""
        for (centre, term), factor in self._factors(scores).items():
            heads = (factor != 1).any(dim=0).nonzero()[:, 0]
            value = ledgers[centre].term(term, slice(rows.start, rows.stop)).expand(*scores.shape[:3], -1)[:, heads]
            added = (factor[:, heads, None, None] - 1) * value[..., : scores.shape[-1]]
            scores[:, heads] += added.to(scores.dtype)

    def _factors(self, scores: Tensor) -> dict[tuple[MeanQK | None, str], Float[Tensor, "batch head"]]:
        """The factor of each term of each split: if several changes scale it, the product of their factors."""
        found: dict[tuple[MeanQK | None, str], Tensor] = {}
        for change in self.scales:
            assert change.intervention.term is not None
            ones = scores.new_ones(scores.shape[:2], dtype=torch.promote_types(scores.dtype, torch.float32))
            factor = found.setdefault((change.intervention.centre, change.intervention.term), ones)
            factor[change.texts, list(change.heads[self.layer])] *= change.intervention.factor
        return found

    def removed(
        self, scores: Tensor, queries: Batch, keys: Batch, mask: "MaskRule", rows: range
    ) -> Bool[Tensor, "batch head row key"] | None:
        """True at the keys that are removed from a block of rows; None if none are."""
        if not self.removals:
            return None
        found = torch.zeros_like(scores, dtype=torch.bool)
        for change in self.removals:
            if change.intervention.edit == "cut":
                cells = change.cut(queries, keys, rows, scores.shape[-1])
                found[change.texts, list(change.heads[self.layer])] |= cells
                continue
            here = change.rows(queries)[:, None, rows.start : rows.stop, None]
            chosen = change.keys(keys)[:, None, None, : scores.shape[-1]] & here
            found[change.texts, list(change.heads[self.layer])] |= chosen
        return found

    def on_pattern(
        self,
        pattern: Float[Tensor, "batch head row key"],
        removed: Bool[Tensor, "batch head row key"] | None,
        queries: Batch,
        keys: Batch,
        mask: "MaskRule",
        rows: range,
    ) -> Float[Tensor, "batch head row key"]:
        """The pattern after all edits; rows left without keys are 0."""
        seen = mask.visible(rows)[..., : pattern.shape[-1]].expand_as(pattern)
        if removed is not None:
            seen = seen & ~removed
            pattern = pattern.masked_fill(removed.any(dim=-1, keepdim=True) & ~seen.any(dim=-1, keepdim=True), 0.0)
        pattern = pattern.clone()
        for change in self.patterns:
            heads = list(change.heads[self.layer])
            here = change.rows(queries)[:, None, rows.start : rows.stop, None]
            new = self._pattern(change, pattern[change.texts], seen[change.texts], keys, rows)
            part = pattern[change.texts, heads]
            pattern[change.texts, heads] = torch.where(here, new[:, heads].to(part), part)
        return pattern

    def _pattern(
        self, change: Applied, pattern: Tensor, seen: Tensor, keys: Batch, rows: range
    ) -> Float[Tensor, "batch head row key"]:
        """What a pattern becomes, in all heads and rows of the block."""
        place = torch.arange(pattern.shape[-1], device=pattern.device)
        edit = change.intervention.edit
        if edit == "replace":
            return change.values(self.layer, pattern)
        if edit == "uniform":
            return seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)
        if edit == "self":
            target = torch.arange(rows.start, rows.stop, device=pattern.device)[:, None]
        else:
            target = keys.mask[change.texts].int().argmax(dim=1)[:, None, None, None]
        return (place == target).to(pattern).expand_as(pattern)

    def change_of_values(self, v: Tensor, heads: int, keys: Batch) -> Float[Tensor, "batch head key d_value"] | None:
        """How much the values that single heads read differ from v `[batch kv_head key d_value]`."""
        if not self.values:
            return None
        own = v.repeat_interleave(heads // v.shape[1], dim=1)
        now = own.clone()
        for change in self.values:
            part, chosen = now[change.texts], list(change.heads[self.layer])
            new = torch.zeros_like(part)
            if change.intervention.values is not None:
                new = change.values(self.layer, part.transpose(1, 2)).transpose(1, 2)
            at = change.keys(keys)[:, None, :, None]
            part[:, chosen] = torch.where(at, new[:, chosen], part[:, chosen])
        return now - own


@dataclass(frozen=True)
class AppliedByPoint:
    """All active changes, by where they act."""

    at_points: Mapping[PointKey, tuple[Applied, ...]] = field(default_factory=dict)
    in_attention: Mapping[tuple[str, int], AppliedInLayer] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """The text of each intervention."""

    @classmethod
    def of(cls, changes: Sequence[Applied]) -> "AppliedByPoint":
        """The changes by where they act, in order."""
        points: dict[PointKey, list[Applied]] = {}
        layers: dict[tuple[str, int], list[Applied]] = {}
        for change in changes:
            one = change.intervention
            for layer in change.heads:
                if one.point in _IN_ATTENTION and not one.by_kv_head:
                    layers.setdefault((one.stack, layer), []).append(change)
                else:
                    points.setdefault((full_name(one.stack, one.point), layer), []).append(change)
        return cls(
            {key: tuple(found) for key, found in points.items()},
            {key: _by_step(key[1], found) for key, found in layers.items()},
            tuple(dict.fromkeys(str(change.intervention) for change in changes)),
        )


def _by_step(layer: int, changes: Iterable[Applied]) -> AppliedInLayer:
    found: dict[str, list[Applied]] = {"scales": [], "removals": [], "patterns": [], "values": []}
    for change in changes:
        one = change.intervention
        step = (
            "removals"
            if one.edit in ("remove", "cut")
            else {"scores": "scales", "pattern": "patterns", "v": "values"}[one.point]
        )
        found[step].append(change)
    return AppliedInLayer(layer, **{step: tuple(some) for step, some in found.items()})
