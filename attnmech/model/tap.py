"""What a forward pass does at each point: edit the value, keep it, or let it pass.

One `Tap` per model. Every activation point of every architecture is one call of `Tap.visit`, so edits,
captures and gradients work alike everywhere, and nothing can be left behind: the tap's state is swapped
in and put back, and the model's modules are never touched again after loading.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from ..activations import Batch
from ..errors import InputError, UnsupportedModelError
from ..points import PointKey, full_name, split_stack
from .acting import Act, Acts, LayerActs

if TYPE_CHECKING:
    from .attention import RowBlock

Edit: TypeAlias = Callable[[Tensor], Tensor | None]
"""A user's hook: takes the value at a point and returns another of the same shape, or None to keep it."""

RowObserver: TypeAlias = "Callable[[RowBlock], None]"
"""Sees every block of rows of the layers watched; reduces it, and keeps nothing large."""

LayerObserver: TypeAlias = "Callable[[LayerEnd], None]"
"""Sees every layer watched when it is through."""


@dataclass(frozen=True)
class Notes:
    """What a layer did to its queries and keys between their projections and the score."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine tables, `[batch position d_rotary]`."""
    query_norm: Tensor | None = None
    """By what qk-norm multiplied the queries, `[batch position head d_head]`."""
    key_norm: Tensor | None = None
    key_input: Tensor | None = None
    """What keys and values were made of, where that is not `attn_in` (cross-attention)."""
    attn_in: Tensor | None = None
    """What queries are made of; noted where a term of the scores is changed."""


class Points:
    """The points of one layer that a pass holds, by their own names: `block["resid_pre"]`."""

    stack: str
    layer: int
    values: Mapping[PointKey, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.values[full_name(self.stack, name), self.layer]

    def __contains__(self, name: str) -> bool:
        return (full_name(self.stack, name), self.layer) in self.values


@dataclass(frozen=True)
class LayerEnd(Points):
    """What a layer's observers see of it when it is through: the points that were asked for."""

    stack: str
    """The label of the stack, empty where the model has one."""
    layer: int
    index: int
    """The place of this layer among those watched."""
    batch: Batch
    values: Mapping[PointKey, Tensor]
    notes: Notes

    @property
    def real(self) -> Bool[Tensor, "batch position"]:
        """True at real tokens, False at padding."""
        return self.batch.queries(self.stack).mask


@dataclass(frozen=True)
class Watch:
    """Who looks on during a pass, and at what."""

    layers: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(stack, layer) of the layers watched, each with its place among them."""
    rows: Sequence[RowObserver] = ()
    ends: Sequence[LayerObserver] = ()
    points: frozenset[PointKey] = frozenset()
    """Handed to them, and let go when the layer ends."""


@dataclass
class Pass:
    """What one forward pass is asked for, and what it has brought so far."""

    batch: Batch
    captures: frozenset[PointKey] = frozenset()
    watch: Watch = field(default_factory=Watch)
    gradients: bool = False
    """Whether the pass will be differentiated: then what is captured must lie on its path."""
    values: dict[PointKey, Tensor] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    """Those of the layer under way."""
    reached: set[PointKey] = field(default_factory=set)
    """The points that were handed to observers and let go."""

    def keeps(self, key: PointKey) -> bool:
        """Whether this point's value is to be kept, for a while or for good."""
        return key in self.captures or key in self.watch.points


class Tap:
    """The edits and interventions in force and the pass under way."""

    def __init__(self) -> None:
        self._edits: list[tuple[PointKey, Edit, object]] = []
        self._acts: list[tuple[Sequence[Act], object]] = []
        self._acting = Acts()
        self._pass: Pass | None = None
        self._in_edit = False

    @property
    def under_way(self) -> Pass:
        """The pass under way."""
        assert self._pass is not None
        return self._pass

    @property
    def edited(self) -> tuple[str, ...]:
        """The points at which edits are in force, "pattern 3", and the interventions, "z of L3H5 becomes 0"."""
        keys = sorted({key for key, _, _ in self._edits}, key=str)
        points = (name if layer is None else f"{name} {layer}" for name, layer in keys)
        return (*points, *self._acting.names)

    @contextmanager
    def editing(self, edits: Sequence[tuple[PointKey, Edit]]) -> Iterator[None]:
        """Adds edits, after those already in force; whatever happens inside, they are gone afterwards.

        Each block takes away its own, in whatever order blocks end.
        """
        mine = object()
        try:
            self._edits = [*self._edits, *((key, edit, mine) for key, edit in edits)]
            yield
        finally:
            self._edits = [entry for entry in self._edits if entry[2] is not mine]

    @contextmanager
    def acting(self, acts: Sequence[Act]) -> Iterator[None]:
        """Adds interventions, after those already in force; whatever happens inside, they are gone afterwards."""
        mine = object()
        try:
            self._acts = [*self._acts, (acts, mine)]
            self._acting = self._all_acts()
            yield
        finally:
            self._acts = [entry for entry in self._acts if entry[1] is not mine]
            self._acting = self._all_acts()

    def _all_acts(self) -> Acts:
        return Acts.of([act for acts, _ in self._acts for act in acts])

    def acts_in(self, stack: str, layer: int) -> LayerActs | None:
        """The interventions inside the attention of a layer."""
        return self._acting.in_attention.get((stack, layer))

    def scales_in(self, stack: str, layer: int) -> bool:
        """Whether terms of the layer's scores are changed."""
        acts = self.acts_in(stack, layer)
        return acts is not None and bool(acts.scales)

    @contextmanager
    def recording(self, wanted: Pass) -> Iterator[Pass]:
        """Makes `wanted` the pass under way; whatever happens inside, the one before is put back."""
        if self._in_edit:
            raise InputError("a hook cannot run the model that it is a hook of; run it before, and use the result.")
        before = self._pass
        try:
            self._pass = wanted
            yield wanted
        finally:
            self._pass = before

    def wants(self, name: str, layer: int | None) -> bool:
        """Whether anyone edits or captures this point."""
        return self.edits(name, layer) or (self._pass is not None and self._pass.keeps((name, layer)))

    def edits(self, name: str, layer: int | None) -> bool:
        """Whether anyone changes this point."""
        here = (name, layer)
        return here in self._acting.at_points or any(key == here for key, _, _ in self._edits)

    def visit(self, name: str, layer: int | None, value: Tensor, *, owned: bool = False) -> Tensor:
        """Passes a value through the interventions and edits at its point, keeps it if asked to, and returns it.

        `owned` says that nobody else will change this tensor in place; all others are copied when kept.
        """
        key = (name, layer)
        if acts := self._acting.at_points.get(key):
            value = value.clone()
            for act in acts:
                assert layer is not None
                act.at_point(value, layer)
        for place, edit, _ in self._edits:
            if place == key:
                value = self._apply(edit, key, value)
        now = self._pass
        if now is not None and now.keeps(key):
            if key in now.values or key in now.reached:
                raise UnsupportedModelError(
                    f"point {_shown(key)} was reached twice in one forward pass: a module of this model stands in "
                    "two places, so its activations have no single meaning."
                )
            if now.gradients:
                # A tensor of its own, so that the derivative is that of this point alone (in BERT attn_in is the
                # stream itself), and a copy to go on with, which the model may change in place (Falcon does).
                now.values[key] = value if owned else value.clone()
                return value if owned else now.values[key].clone()
            now.values[key] = value if owned else value.detach().clone()
        return value

    def note(self, **found: Any) -> None:
        """Adds to the notes on the layer under way."""
        if self._pass is not None:
            self._pass.notes = replace(self._pass.notes, **found)

    def begin_layer(self) -> None:
        """Forgets the notes on the layer before."""
        if self._pass is not None:
            self._pass.notes = Notes()

    def end_layer(self, stack: str, layer: int) -> None:
        """Shows the layer to its observers, then lets go what was kept for them alone."""
        now = self._pass
        if now is None or (stack, layer) not in now.watch.layers:
            return
        end = LayerEnd(stack, layer, now.watch.layers[stack, layer], now.batch, now.values, now.notes)
        for observe in now.watch.ends:
            observe(end)
        for key in now.watch.points - now.captures:
            if key[1] == layer and split_stack(key[0])[0] == stack and now.values.pop(key, None) is not None:
                now.reached.add(key)

    def _apply(self, edit: Edit, key: PointKey, value: Tensor) -> Tensor:
        # A copy, so that an edit in place changes this point and nothing that shares its memory.
        given = value.clone()
        try:
            self._in_edit = True
            edited = edit(given)
        finally:
            self._in_edit = False
        if edited is None:
            return given
        if not isinstance(edited, torch.Tensor):
            raise InputError(
                f"the hook at {_shown(key)} must return a tensor, or None to keep the value; it returned "
                f"{type(edited).__name__}."
            )
        if edited.shape != value.shape:
            raise InputError(
                f"the hook at {_shown(key)} must keep the shape {tuple(value.shape)}; it returned "
                f"{tuple(edited.shape)}."
            )
        return edited.to(value)


def _shown(key: PointKey) -> str:
    name, layer = key
    return repr(name) if layer is None else repr((name, layer))
