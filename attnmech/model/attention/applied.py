"""Applies interventions to a model: finds their texts, heads and rows in the running batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ...batch import Batch
from ...errors import InputError
from ...interventions.edits import Edit, KeyEdit, PatternEdit, PointEdit, Scale, ValueEdit
from ...interventions.intervention import Intervention
from ...interventions.values import BatchPart, Block, Values
from ...maths.scores import ScoreParts
from ...maths.softmax import Attention
from ...points import PointKey, full_name
from ...results.mean_qk import MeanQK
from .observed import LayerAttention

Ledger: TypeAlias = Callable[[Any, Tensor, Tensor, Batch, MeanQK | None], ScoreParts]
"""Splits a layer's scores into terms, from what the scores depend on, the mask, the batch and the means."""

Kind = TypeVar("Kind", bound=Edit)


@dataclass(frozen=True)
class Applied:
    """One intervention, applied to some texts of the running batch."""

    intervention: Intervention
    heads: Mapping[int, tuple[int, ...]]
    """The layers that it changes, each with the heads that it changes there (none at a point of the stream)."""
    part: BatchPart = field(default_factory=BatchPart)
    ledger: Ledger | None = None  # the function that splits the scores, if the intervention scales a term of them

    def cells(self, layer: int) -> tuple[slice, list[int]]:
        """The texts and heads that it changes in a layer, as an index into `[batch head ...]`."""
        return self.part.texts, list(self.heads[layer])

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefixes an `InputError` raised in the block with the intervention's sentence."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.intervention}: {error}") from None

    def rows(self, batch: Batch) -> Bool[Tensor, "batch position"]:
        """True at the rows that it changes, for the texts that it changes; the tokens of `batch` are the rows."""
        chosen = self.intervention.positions
        rows = torch.ones_like(batch.mask) if chosen is None else batch.at(chosen)
        return rows[self.part.texts]

    def at_point(self, value: Tensor, layer: int, batch: Batch, *, past: int = 0) -> None:
        """Changes a value `[batch position ...]` (q, k, v, z, or the stream) in place.

        After `past` tokens whose keys are cached, a value may have only the rows of later tokens.
        """
        one = self.intervention
        part, heads = value[self.part.texts], list(self.heads[layer])
        assert isinstance(one.edit, PointEdit)
        edit: PointEdit = one.edit
        tokens = (batch.keys if one.by_kv_head else batch.queries)(one.stack)
        past = tokens.ids.shape[1] - part.shape[1] if past else 0
        with self.named():
            new = _by_token(edit, tokens, self.part, part, partial(edit.new, layer=layer, part=self.part), past)
            if one.positions is not None:
                rows = self.rows(tokens)[:, past:]
                new = torch.where(rows.view(*part.shape[:2], *(1 for _ in part.shape[2:])), new, part)
        if heads:
            part[:, :, heads] = new[:, :, heads]
        else:
            part[:] = new


def _by_token(
    edit: Edit, batch: Batch, part: BatchPart, value: Tensor, change: Callable[[Tensor], Tensor], past: int = 0
) -> Float[Tensor, "batch position ..."]:
    """The changed value; for an edit with values of tokens, `change` gets tokens before their padding."""
    values = getattr(edit, "values", None)
    if past and values is not None and values.by_position:
        whole = pad(value, (*[0, 0] * (value.ndim - 2), past, 0))
        return _by_token(edit, batch, part, whole, change)[:, past:]
    if not (isinstance(values, Values) and values.of_tokens and batch.padded):
        return change(value)
    columns = batch.columns[part.texts, : int(batch.lengths[part.texts].max())]
    columns = columns.reshape(*columns.shape, *[1] * (value.ndim - 2)).expand(*columns.shape, *value.shape[2:])
    return value.scatter(1, columns, change(value.gather(1, columns)).to(value))


@dataclass(frozen=True)
class AppliedInLayer:
    """The changes inside the attention of one layer."""

    layer: int
    changes: tuple[Applied, ...]

    def _of(self, kind: type[Kind]) -> list[tuple[Applied, Kind]]:
        edits = ((change, change.intervention.edit) for change in self.changes)
        return [(change, edit) for change, edit in edits if isinstance(edit, kind)]

    @property
    def scales(self) -> list[Intervention]:
        return [change.intervention for change, _ in self._of(Scale)]

    @property
    def edits_pattern(self) -> bool:
        """Whether the pattern differs from the softmax of the scores."""
        return bool(self._of(KeyEdit) or self._of(PatternEdit))

    @property
    def whole_rows(self) -> bool:
        """Whether a change may put weight on keys that no row of a block can see."""
        return any(edit.ANY_KEY for _, edit in self._of(PatternEdit))

    def ledgers(
        self, of_layer: LayerAttention, visible: Bool[Tensor, "batch 1 query key"], batch: Batch
    ) -> dict[MeanQK | None, ScoreParts]:
        """The terms of the current scores, split as changes ask; `InputError` if a term to be scaled is missing."""
        scales = self._of(Scale)
        make, attn_in = scales[0][0].ledger, of_layer.notes.attn_in
        assert make is not None and attn_in is not None
        centres = dict.fromkeys(edit.centre for _, edit in scales)
        ledgers = {centre: make(of_layer, attn_in, visible, batch, centre) for centre in centres}
        for change, edit in scales:
            names = [name for name in ledgers[edit.centre].names() if name not in ("mask", "softcap")]
            if edit.term not in names:
                raise InputError(
                    f"{change.intervention}: the scores of this model have no such term; they have {', '.join(names)}."
                )
        return ledgers

    def on_scores(self, scores: Tensor, ledgers: Mapping[MeanQK | None, ScoreParts], rows: range) -> None:
        """Scales terms of the scores `[batch head row key]` in place, before a soft cap."""
        for (centre, term), factor in self._factors(scores).items():
            heads = (factor != 1).any(dim=0).nonzero()[:, 0]
            value = ledgers[centre].term(term, slice(rows.start, rows.stop)).expand(*scores.shape[:3], -1)[:, heads]
            added = (factor[:, heads, None, None] - 1) * value[..., : scores.shape[-1]]
            scores[:, heads] += added.to(scores.dtype)

    def _factors(self, scores: Tensor) -> dict[tuple[MeanQK | None, str], Float[Tensor, "batch head"]]:
        """The factor of each term of each split: the product of the factors of all changes that scale it."""
        factors: dict[tuple[MeanQK | None, str], Tensor] = {}
        for change, edit in self._of(Scale):
            ones = scores.new_ones(scores.shape[:2], dtype=torch.promote_types(scores.dtype, torch.float32))
            factors.setdefault((edit.centre, edit.term), ones)[change.cells(self.layer)] *= edit.factor
        return factors

    def removed(
        self, scores: Tensor, queries: Batch, keys: Batch, rows: range
    ) -> Bool[Tensor, "batch head row key"] | None:
        """True at the keys that are removed from a block of rows; None if none are."""
        removals = self._of(KeyEdit)
        if not removals:
            return None
        removed = torch.zeros_like(scores, dtype=torch.bool)
        for change, edit in removals:
            with change.named():
                block = Block(self.layer, change.part, queries, keys, slice(rows.start, rows.stop), scores.shape[-1])
                hidden = edit.hidden(block) & change.rows(queries)[:, block.rows, None]
            removed[change.cells(self.layer)] |= hidden[:, None]
        return removed

    def on_pattern(
        self,
        attention: Attention,
        removed: Bool[Tensor, "batch head row key"] | None,
        queries: Batch,
        keys: Batch,
        visible: Bool[Tensor, "batch 1 row all_keys"],
        rows: range,
    ) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row"] | None]:
        """The pattern and the share of a sink after all edits; rows left without keys are 0."""
        pattern, at_sink = attention.pattern, attention.at_sink
        seen = visible[..., : pattern.shape[-1]].expand_as(pattern)
        if removed is not None:
            seen = seen & ~removed
            pattern = pattern.masked_fill(removed.any(dim=-1, keepdim=True) & ~seen.any(dim=-1, keepdim=True), 0.0)
        pattern, at_sink = pattern.clone(), None if at_sink is None else at_sink.clone()
        for change, edit in self._of(PatternEdit):
            texts, heads = cells = change.cells(self.layer)
            with change.named():
                block = Block(self.layer, change.part, queries, keys, slice(rows.start, rows.stop), pattern.shape[-1])
                sunk = None if at_sink is None else at_sink[texts]
                new, sunk = edit.with_sink(pattern[texts], sunk, seen[texts], block)
                here = change.rows(queries)[:, None, block.rows]
            if at_sink is not None and sunk is not None:
                at_sink[cells] = torch.where(here, sunk[:, heads], at_sink[cells])
            pattern[cells] = torch.where(here[..., None], new[:, heads].to(pattern), pattern[cells])
        return pattern, at_sink

    def change_of_values(self, v: Tensor, heads: int, keys: Batch) -> Float[Tensor, "batch head key d_value"] | None:
        """The values that each head reads minus v `[batch kv_head key d_value]`; None if none differ."""
        edits = self._of(ValueEdit)
        if not edits:
            return None
        own = v.repeat_interleave(heads // v.shape[1], dim=1)
        now = own.clone()
        for change, edit in edits:
            part, chosen = now[change.part.texts], list(change.heads[self.layer])
            with change.named():
                of_keys = part.transpose(1, 2)
                new = _by_token(edit, keys, change.part, of_keys, partial(edit.new, layer=self.layer, part=change.part))
                new = new.transpose(1, 2)
                here = edit.selected(keys, change.part)[:, None, :, None]
            part[:, chosen] = torch.where(here, new[:, chosen], part[:, chosen])
        return now - own


@dataclass(frozen=True)
class AppliedByPoint:
    """All active changes, sorted by where they act."""

    at_points: Mapping[PointKey, tuple[Applied, ...]] = field(default_factory=dict)
    in_attention: Mapping[tuple[str, int], AppliedInLayer] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # the sentence of each intervention

    @classmethod
    def of(cls, changes: Sequence[Applied]) -> "AppliedByPoint":
        """Sorts changes by where they act, keeping their order."""
        points: dict[PointKey, list[Applied]] = {}
        layers: dict[tuple[str, int], list[Applied]] = {}
        for change in changes:
            one = change.intervention
            for layer in change.heads:
                if isinstance(one.edit, PointEdit):
                    points.setdefault((full_name(one.stack, one.point), layer), []).append(change)
                else:
                    layers.setdefault((one.stack, layer), []).append(change)
        return cls(
            {key: tuple(held) for key, held in points.items()},
            {key: AppliedInLayer(key[1], tuple(held)) for key, held in layers.items()},
            tuple(dict.fromkeys(str(change.intervention) for change in changes)),
        )
