"""How interventions act on a pass: in which texts, on which cells, at which step of the attention."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations import Batch
from ..errors import InputError
from ..interventions import Intervention, Values
from ..maths.scores import ScoreParts
from ..points import PointKey, full_name

if TYPE_CHECKING:
    from .attention import LayerFacts, MaskRule

Ledger: TypeAlias = Callable[[Any, Tensor, Tensor], ScoreParts]
"""Makes the terms of a layer's scores from what the layer is, `attn_in`, and what is visible."""

_IN_ATTENTION: Final = ("pattern", "scores", "v")
"""The points whose edits need more than the value at the point."""


@dataclass(frozen=True)
class Act:
    """One intervention in force in a model, in some texts of the batch that runs."""

    intervention: Intervention
    heads: Mapping[int, tuple[int, ...]]
    """The layers that it touches, each with its heads; without heads at points of the stream."""
    texts: slice = field(default_factory=lambda: slice(None))
    """The rows of the running batch that it acts in."""
    source: slice | Tensor = field(default_factory=lambda: slice(None))
    """Which of the texts that the intervention's values are made for stand there."""
    special: frozenset[int] = frozenset()
    """The ids of the tokenizer's special tokens."""
    ledger: Ledger | None = None
    """Where a term of the scores is changed: what makes the terms."""

    def values(self, layer: int, length: int, texts: int) -> Tensor:
        """What it puts in, `[#batch #position ...]` for the texts and positions of this pass."""
        assert self.intervention.values is not None
        given = self.intervention.values.by_layer
        if layer not in given:
            raise InputError(f"{self.intervention}: there are values for layers {sorted(given)}, but none for {layer}.")
        value = self._of_texts(given[layer], texts)
        # Patterns have their heads before their rows.
        axis = 2 if self.intervention.point == "pattern" else 1
        if value.shape[axis] not in (1, length) and value.shape[axis] < length:
            raise InputError(
                f"{self.intervention}: its values are for {value.shape[axis]} positions, but the text has {length}."
            )
        return value.narrow(axis, 0, min(length, value.shape[axis]))

    def _of_texts(self, value: Tensor, texts: int) -> Tensor:
        chosen = value if len(value) == 1 else value[self.source]
        if len(chosen) not in (1, texts):
            raise InputError(
                f"{self.intervention}: it is made for {len(value)} texts, but {texts} run; give values for each or "
                "for one."
            )
        return chosen

    def positions(self, length: int) -> list[int]:
        """The rows of a text that it acts on."""
        chosen = self.intervention.positions
        if chosen is None:
            return list(range(length))
        if max(chosen) >= length:
            raise InputError(f"{self.intervention}: the text has {length} positions, from 0 on.")
        return list(chosen)

    def keys(self, batch: Batch) -> Bool[Tensor, "batch key"]:
        """The keys that are meant, of the texts it acts in."""
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
            known = torch.tensor(sorted(self.special), device=ids.device, dtype=ids.dtype)
            return torch.isin(ids, known) & mask
        assert isinstance(wanted, tuple)
        if max(wanted) >= ids.shape[1]:
            raise InputError(f"{self.intervention}: the text has {ids.shape[1]} keys, from 0 on.")
        return torch.isin(place, torch.tensor(wanted, device=ids.device)).expand(len(ids), -1)

    def at_point(self, value: Tensor, layer: int) -> None:
        """Changes, in place, a value with the axes `batch position ...`: z, or the stream."""
        part = value[self.texts]
        rows = torch.tensor(self.positions(part.shape[1]), device=value.device)
        whole = self.intervention.positions is None
        new: Any = 0.0
        if self.intervention.values is not None:
            new = self.values(layer, part.shape[1], len(part)).to(part)
            new = new if whole or new.shape[1] == 1 else new[:, rows]
        if not self.heads[layer]:
            part[:, slice(None) if whole else rows] = new
            return
        heads = self._heads(layer, value)
        if isinstance(new, torch.Tensor):
            new = new[:, :, heads]
        if whole:
            part[:, :, heads] = new
        else:
            part[:, rows[:, None], heads] = new

    def _heads(self, layer: int, value: Tensor) -> Tensor:
        return torch.tensor(self.heads[layer], device=value.device)


@dataclass(frozen=True)
class LayerActs:
    """The acts inside the attention of one layer, in the order of its steps."""

    layer: int
    scales: tuple[Act, ...] = ()
    removals: tuple[Act, ...] = ()
    patterns: tuple[Act, ...] = ()
    values: tuple[Act, ...] = ()

    @property
    def edits_pattern(self) -> bool:
        """Whether the pattern is another than the softmax of the scores."""
        return bool(self.removals or self.patterns)

    @property
    def whole_rows(self) -> bool:
        """Whether it may put weight on keys that no row of a block may see."""
        return any(act.intervention.edit == "replace" for act in self.patterns)

    def ledger(self, facts: "LayerFacts", mask: "MaskRule") -> ScoreParts | None:
        """The terms of the scores under way, where one is to be scaled."""
        if not self.scales:
            return None
        make, attn_in = self.scales[0].ledger, facts.notes.attn_in
        assert make is not None and attn_in is not None
        parts = make(facts, attn_in, mask.visible(range(mask.queries)))
        there = [name for name in parts.names() if name not in ("mask", "softcap")]
        for act in self.scales:
            if act.intervention.term not in there:
                raise InputError(
                    f"{act.intervention}: the scores of this model have no such term; they have {', '.join(there)}."
                )
        return parts

    def on_scores(self, scores: Tensor, parts: ScoreParts, rows: range) -> None:
        """Scales terms of the ledger inside scores `[batch head row key]`, in place, before a soft cap."""
        for act in self.scales:
            assert act.intervention.term is not None
            heads = act._heads(self.layer, scores)
            made = parts.term(act.intervention.term, slice(rows.start, rows.stop))
            made = made.expand(*scores.shape[:3], -1)[act.texts][:, heads]
            change = (act.intervention.factor - 1) * made.expand(-1, -1, -1, max(made.shape[-1], scores.shape[-1]))
            scores[act.texts, heads] += change[..., : scores.shape[-1]].to(scores.dtype)

    def hide(self, scores: Tensor, keys: Batch, rows: range) -> None:
        """Hides the keys that are removed, in place."""
        for act in self.removals:
            heads = act._heads(self.layer, scores)
            removed = self._removed(act, keys, rows, scores)
            lowest = torch.finfo(scores.dtype).min
            scores[act.texts, heads] = scores[act.texts, heads].masked_fill(removed[:, None], lowest)

    def _removed(self, act: Act, keys: Batch, rows: range, scores: Tensor) -> Bool[Tensor, "batch row key"]:
        chosen = torch.zeros(len(rows), dtype=torch.bool, device=scores.device)
        chosen[[row - rows.start for row in act.positions(self._length(act, keys, rows)) if row in rows]] = True
        return act.keys(keys)[:, None, : scores.shape[-1]] & chosen[:, None]

    def _length(self, act: Act, keys: Batch, rows: range) -> int:
        return max(keys.ids.shape[1], rows.stop) if act.intervention.positions is not None else rows.stop

    def on_pattern(self, pattern: Tensor, keys: Batch, mask: "MaskRule", rows: range) -> Tensor:
        """The pattern `[batch head row key]` after all edits; rows that were left no key are 0."""
        pattern = pattern.clone()
        visible = mask.visible(rows)[..., : pattern.shape[-1]]
        for act in self.removals:
            heads = act._heads(self.layer, pattern)
            left = visible[act.texts] & ~self._removed(act, keys, rows, pattern)[:, None]
            pattern[act.texts, heads] = pattern[act.texts, heads] * left
        for act in self.patterns:
            self._edit(act, pattern, visible, keys, rows)
        return pattern

    def _edit(self, act: Act, pattern: Tensor, visible: Tensor, keys: Batch, rows: range) -> None:
        heads = act._heads(self.layer, pattern)
        part = pattern[act.texts, heads]
        length = self._length(act, keys, rows)
        chosen = [row - rows.start for row in act.positions(length) if row in rows]
        part[:, :, chosen] = self._new(act, part, visible[act.texts], keys, rows, heads)[:, :, chosen].to(part)
        pattern[act.texts, heads] = part

    def _new(
        self, act: Act, part: Tensor, visible: Tensor, keys: Batch, rows: range, heads: Tensor
    ) -> Float[Tensor, "batch head row key"]:
        edit = act.intervention.edit
        places = torch.arange(part.shape[-1], device=part.device)
        if edit == "replace":
            given = act.values(self.layer, rows.stop, len(part)).to(part)
            given = given[:, :, rows.start : rows.stop] if given.shape[2] > 1 else given
            if given.shape[1] > 1:
                given = given[:, heads]
            return given[..., : part.shape[-1]].expand_as(part)
        if edit == "uniform":
            seen = visible.to(part.dtype)
            return (seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)).expand_as(part)
        if edit == "self":
            own = torch.arange(rows.start, rows.stop, device=part.device)
            return (places == own[:, None]).to(part.dtype).expand_as(part)
        begins = keys.mask[act.texts].int().argmax(dim=1)
        return (places == begins[:, None]).to(part.dtype)[:, None, None].expand_as(part)

    def on_values(self, z: Tensor, pattern: Tensor, v: Tensor, keys: Batch) -> None:
        """Takes out of z `[batch head row d_head]`, in place, what was read at keys whose values are others now."""
        shared = pattern.shape[1] // v.shape[1]
        for act in self.values:
            heads = act._heads(self.layer, z)
            own = v[act.texts, heads // shared]
            if act.intervention.values is None:
                change = -own
            else:
                new = act.values(self.layer, keys.ids.shape[1], len(own)).to(own)
                change = new[:, :, heads].transpose(1, 2)[:, :, : own.shape[2]] - own
            chosen = act.keys(keys)[:, None, : own.shape[2], None]
            z[act.texts, heads] += pattern[act.texts, heads].to(v.dtype) @ (change * chosen)


@dataclass(frozen=True)
class Acts:
    """All that is in force, by where it acts."""

    at_points: Mapping[PointKey, tuple[Act, ...]] = field(default_factory=dict)
    in_attention: Mapping[tuple[str, int], LayerActs] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """What each intervention says of itself."""

    @classmethod
    def of(cls, acts: Sequence[Act]) -> "Acts":
        """The acts by where they act, in their order."""
        points: dict[PointKey, list[Act]] = {}
        layers: dict[tuple[str, int], list[Act]] = {}
        for act in acts:
            one = act.intervention
            for layer in act.heads:
                if one.point in _IN_ATTENTION:
                    layers.setdefault((one.stack, layer), []).append(act)
                else:
                    points.setdefault((full_name(one.stack, one.point), layer), []).append(act)
        return cls(
            {key: tuple(found) for key, found in points.items()},
            {key: _by_step(key[1], found) for key, found in layers.items()},
            tuple(dict.fromkeys(str(act.intervention) for act in acts)),
        )


def _by_step(layer: int, acts: Iterable[Act]) -> LayerActs:
    found: dict[str, list[Act]] = {"scales": [], "removals": [], "patterns": [], "values": []}
    for act in acts:
        one = act.intervention
        step = (
            "removals"
            if one.edit == "remove"
            else {"scores": "scales", "pattern": "patterns", "v": "values"}[one.point]
        )
        found[step].append(act)
    return LayerActs(layer, **{step: tuple(some) for step, some in found.items()})
