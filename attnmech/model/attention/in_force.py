"""Holds the hooks and interventions in force and the current forward pass, which edits and captures values at points.

Every activation point of every architecture is one call of `InForce.visit`, so edits, captures and gradients work alike
everywhere. Edits and the current pass belong to the call, not to the model: they live in a context variable, so that
threads and tasks with different edits can run one model at the same time, and each gets the results that it would get
alone. A new thread begins with no edits in force; `contextvars.copy_context().run` passes on the caller's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ...basics.arguments import dense
from ...batch import Batch
from ...errors import InputError, UnsupportedModelError
from ...interventions import Intervention
from ...points import PointKey, point_of, split_stack
from ..parts.mask import HIDDEN
from .applied import Applied, AppliedByPoint, AppliedInLayer
from .identities import Kind
from .observed import LayerEnd, LayerObserver, Notes, RowObserver
from .running import Balance

Hook: TypeAlias = Callable[[Tensor], Tensor | None]
"""A user's hook: takes the value at a point and returns a new value of the same shape, or None to leave the value
unchanged."""


@dataclass(frozen=True)
class Watch:
    """The observers of a pass, and what they observe."""

    layers: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Maps (stack, layer) of each watched layer to its index among the watched layers."""
    rows: Sequence[RowObserver] = ()
    ends: Sequence[LayerObserver] = ()
    points: frozenset[PointKey] = frozenset()  # the points passed to the observers, and freed when the layer ends


@dataclass(frozen=True)
class Part:
    """The blocks that a pass runs; the other blocks pass the stream on unchanged."""

    start: int
    stop: int  # the first block after those that run
    stream: Float[Tensor, "batch position d_model"] | None = None  # the input of block `start`; None if `start` is 0
    keep: frozenset[int] = frozenset()  # the blocks whose input is kept, before hooks; their number is the last output
    kept: dict[int, Float[Tensor, "batch position d_model"]] = field(default_factory=dict)

    def runs(self, block: int) -> bool:
        return self.start <= block < self.stop


_AFTER_KEYS: Final = frozenset(
    ("q", "q_rot", "scores", "pattern", "gate", "z", "result", "attn_raw", "attn_out", "resid_mid", "mixer_out",
     "mlp_out", "resid_post", "logits")
)  # fmt: skip
"""The points on which no key or value of their own layer depends."""


@dataclass
class Earlier:
    """What a generation with a cache keeps of earlier passes: the rows that edits need of all tokens."""

    last: int | None = None  # the model's last block, if it has attention; no cached key or value depends on its output
    _rows: dict[Any, Tensor] = field(default_factory=dict)

    def joined(self, key: Any, value: Tensor, length: int, axis: int = 1, hidden: float = 0.0) -> Tensor:
        """The rows of earlier passes, then those of `value`, which are kept; `value` itself if it has all rows."""
        before = self._rows.get(key)
        if before is not None and value.shape[axis] < length:
            before = before.narrow(axis, 0, length - value.shape[axis])
            value = torch.cat((_widened(before, value, hidden) if axis == 2 else before, value), dim=axis)
        # The model may change its own tensors in place.
        self._rows[key] = value.clone()
        return value

    def feeds_cache(self, name: str, layer: int | None) -> bool:
        """Whether cached keys and values depend on the value at a point."""
        after = split_stack(name)[1] in _AFTER_KEYS
        return not (after and layer in (None, self.last))

    def require_kept(self, key: PointKey, edited: Tensor, axis: int, hidden: float) -> None:
        """Raises `InputError` if hooks change the rows of earlier tokens otherwise than in earlier passes."""
        before = self._rows.get(("edited", key))
        self._rows["edited", key] = edited.clone()
        if before is None or not self.feeds_cache(*key):
            return
        now, before = edited.narrow(axis, 0, before.shape[axis]), _widened(before, edited, hidden)
        if hidden:
            now, before = (rows.masked_fill(rows <= HIDDEN, torch.nan) for rows in (now, before))
        size = torch.maximum(now.abs(), before.abs()).nan_to_num().amax(dim=-1, keepdim=True)
        same = (now - before).abs() <= 64 * torch.finfo(now.dtype).eps * size
        if not bool((same | (now.isnan() & before.isnan())).all()):
            raise InputError(
                f"the hook at {_shown(key)} gives rows of earlier tokens other values as the text grows, and the cache "
                "holds keys and values computed from them. Let it change each row by the row alone, at positions "
                "counted from the first, or give generate cache=False: a full pass for each token."
            )


def _widened(rows: Tensor, like: Tensor, hidden: float) -> Tensor:
    """Rows of a pattern or scores, with the keys that came later."""
    return pad(rows, (0, like.shape[-1] - rows.shape[-1]), value=hidden)


@dataclass
class Pass:
    """One forward pass: what it is to capture, and what it has captured so far."""

    batch: Batch
    captures: frozenset[PointKey] = frozenset()
    watch: Watch = field(default_factory=Watch)
    gradients: bool = False  # whether the pass will be differentiated; captured values must then be part of its graph
    part: Part | None = None  # the blocks that it runs; None for all
    values: dict[PointKey, Tensor] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)  # the notes of the current layer
    reached: set[PointKey] = field(default_factory=set)  # the points that were passed to observers and freed
    edits: Mapping[PointKey, Sequence[Hook]] = field(default_factory=dict)  # the hooks in force when the pass began
    applied: AppliedByPoint = field(default_factory=AppliedByPoint)  # the interventions in force when the pass began
    in_edit: bool = False  # whether a hook is running
    balance: Balance | None = None  # compared when the pass ends; None in passes of the certificate itself
    in_force: "InForce | None" = None  # identifies the model that runs
    outer: "Pass | None" = None  # the pass, of this or another model, during which this pass runs
    past: int = 0  # the number of tokens whose keys and values come from a cache; the pass computes only later rows
    earlier: Earlier | None = None  # rows of earlier passes, in a generation with a cache

    def keeps(self, key: PointKey) -> bool:
        """Whether to keep the value of this point, for the result or until the layer's observers have seen it."""
        return key in self.captures or key in self.watch.points

    @property
    def skipped(self) -> tuple[str, ...]:
        """The checks that the running certificate could not make in this pass, with the reasons."""
        return () if self.balance is None else tuple(self.balance.skipped)


@dataclass
class _Block:
    edits: Sequence[tuple[PointKey, Hook]] = ()
    changes: Sequence[Applied] = ()
    unchecked: bool = False
    open: bool = True  # False once the `with` block has ended, in any context


_in_force: ContextVar[Mapping["InForce", tuple[_Block, ...]]] = ContextVar("in force", default=MappingProxyType({}))
"""One variable serves all models, since a context keeps its variables forever; it lists only models with active
edits."""
_under_way: ContextVar[Pass | None] = ContextVar("under way", default=None)
"""The innermost pass: while a module runs, the pass of its model."""


class InForce:
    """The edits and interventions in force on a model, and its current pass, in the context of the call."""

    def _open(self) -> tuple[_Block, ...]:
        return tuple(block for block in _in_force.get().get(self, ()) if block.open)

    def _become(self, blocks: tuple[_Block, ...]) -> None:
        others = {in_force: held for in_force, held in _in_force.get().items() if in_force is not self}
        _in_force.set({**others, self: blocks} if blocks else others)

    @property
    def edit_functions(self) -> tuple[tuple[PointKey, Hook], ...]:
        """The hooks in force, each with its point, in the order in which they apply."""
        return tuple(entry for block in self._open() for entry in block.edits)

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions in force, in the order in which they were given."""
        return tuple(change.intervention for block in self._open() for change in block.changes)

    @property
    def edited(self) -> tuple[str, ...]:
        """The points at which edits are in force ("pattern 3"), and the interventions ("z of L3H5 becomes 0")."""
        keys = sorted({key for key, _ in self.edit_functions}, key=str)
        points = (name if layer is None else f"{name} {layer}" for name, layer in keys)
        return (*points, *self._applied_now().names)

    def _applied_now(self) -> AppliedByPoint:
        return AppliedByPoint.of([change for block in self._open() for change in block.changes])

    def editing(self, edits: Sequence[tuple[PointKey, Hook]]) -> AbstractContextManager[None]:
        """Adds edits after those already active; however the block ends, they are gone afterwards.

        Each block removes its own edits, in whatever order the blocks end.
        """
        return self._in_force(_Block(edits=tuple(edits)))

    def applying(self, changes: Sequence[Applied]) -> AbstractContextManager[None]:
        """Adds interventions after those already active; however the block ends, they are gone afterwards."""
        return self._in_force(_Block(changes=tuple(changes)))

    def unchecked(self) -> AbstractContextManager[None]:
        """Switches the running certificate off for passes inside, such as those that show what a model does wrong."""
        return self._in_force(_Block(unchecked=True))

    @property
    def checks(self) -> bool:
        return not any(block.unchecked for block in self._open())

    @contextmanager
    def _in_force(self, block: _Block) -> Iterator[None]:
        try:
            self._become((*self._open(), block))
            yield
        finally:
            block.open = False
            self._become(self._open())

    @property
    def running(self) -> bool:
        return any(now.in_force is self for now in _passes())

    @property
    def under_way(self) -> Pass:
        now = _under_way.get()
        assert now is not None
        return now

    @contextmanager
    def recording(self, wanted: Pass) -> Iterator[Pass]:
        """Makes `wanted` the current pass, with the active edits; the previous pass returns however the block ends."""
        if any(now.in_force is self and now.in_edit for now in _passes()):
            raise InputError("a hook cannot run its own model; run the model before, and use the result in the hook.")
        wanted.in_force, wanted.outer = self, _under_way.get()
        edits: dict[PointKey, list[Hook]] = {}
        for key, edit in self.edit_functions:
            edits.setdefault(key, []).append(edit)
        wanted.edits, wanted.applied = edits, self._applied_now()
        try:
            _under_way.set(wanted)
            yield wanted
        finally:
            _under_way.set(wanted.outer)

    def passes_by(self, block: int) -> bool:
        part = self.under_way.part
        return part is not None and not part.runs(block)

    def applied_in(self, stack: str, layer: int) -> AppliedInLayer | None:
        return self.under_way.applied.in_attention.get((stack, layer))

    def scales_in(self, stack: str, layer: int) -> bool:
        """Whether an intervention scales terms of the layer's scores."""
        changes = self.applied_in(stack, layer)
        return changes is not None and bool(changes.scales)

    def wants(self, name: str, layer: int | None) -> bool:
        """Whether this point is edited or captured."""
        return self.edits(name, layer) or self.under_way.keeps((name, layer))

    def edits(self, name: str, layer: int | None) -> bool:
        here, now = (name, layer), self.under_way
        return here in now.edits or here in now.applied.at_points

    def visit(self, name: str, layer: int | None, value: Tensor, *, owned: bool = False) -> Tensor:
        """Passes a value through the interventions and edits at its point, keeps it if it is captured, and returns it.

        `owned` says that nothing else will change this tensor in place; any other tensor is copied when it is kept.
        """
        key, now = (name, layer), self.under_way
        if changes := now.applied.at_points.get(key):
            value = value.clone()
            for change in changes:
                assert layer is not None
                change.at_point(value, layer, now.batch, past=now.past)
        if edits := now.edits.get(key):
            value = _hooked(edits, key, value, now)
        if not now.keeps(key):
            return value
        if key in now.values or key in now.reached:
            raise UnsupportedModelError(
                f"point {_shown(key)} was reached twice in one forward pass: this model uses a module in two places, "
                "so its activations have no single meaning."
            )
        if now.gradients:
            # A separate tensor, so that the derivative is taken at this point alone (in BERT, attn_in is the stream
            # itself), and a copy to continue with, which the model may change in place (as Falcon does).
            kept = value if owned else value.clone()
            if not kept.requires_grad:
                # A hook has cut the graph here or below; the derivative at this point is still defined.
                kept = kept.detach().requires_grad_()
            now.values[key] = kept
            return kept if owned else kept.clone()
        now.values[key] = value if owned else value.detach().clone()
        return value

    @property
    def balance(self) -> Balance | None:
        """The record of the running certificate; None in passes that it does not check."""
        return self.under_way.balance

    def hold(self, kind: Kind, stack: str, layer: int, value: Tensor) -> None:
        """Shows a quantity to the running certificate."""
        if (balance := self.balance) is not None:
            balance.hold(kind, stack, layer, value)

    def note(self, **facts: Any) -> None:
        now = self.under_way
        now.notes = replace(now.notes, **facts)

    def whole_notes(self, stack: str, layer: int) -> Notes:
        """The notes on the current layer, for all tokens of the text."""
        join = partial(self.joined, stack=stack, layer=layer)
        return self.under_way.notes if self.under_way.earlier is None else self.under_way.notes.joined(join)

    def joined(self, name: str, value: Tensor, *, stack: str, layer: int, axis: int = 1) -> Tensor:
        """A value of the current layer for all tokens of the text: after its rows in earlier passes."""
        now = self.under_way
        if now.earlier is None:
            return value
        return now.earlier.joined((stack, layer, name), value, now.batch.queries(stack or "decoder").ids.shape[1], axis)

    def end_layer(self, stack: str, layer: int) -> None:
        """Shows the layer to its observers, then frees the values that were kept only for the observers."""
        now = self.under_way
        if (stack, layer) not in now.watch.layers:
            return
        end = LayerEnd(stack, layer, now.watch.layers[stack, layer], now.batch, now.values, now.notes)
        for observe in now.watch.ends:
            observe(end)
        for key in now.watch.points - now.captures:
            if key[1] == layer and split_stack(key[0])[0] == stack and now.values.pop(key, None) is not None:
                now.reached.add(key)


def _passes() -> Iterator[Pass]:
    """The running passes, innermost first."""
    now = _under_way.get()
    while now is not None:
        yield now
        now = now.outer


def _hooked(edits: Sequence[Hook], key: PointKey, value: Tensor, now: Pass) -> Tensor:
    """The value after hooks, which see the rows of all tokens; of these, the pass goes on with its own."""
    if now.earlier is None:
        for edit in edits:
            value = _applied(edit, key, value, now)
        return value
    axis = 2 if "query" in point_of(key[0]).axes else 1
    hidden = torch.finfo(value.dtype).min if split_stack(key[0])[1] == "scores" else 0.0
    length = now.batch.queries(split_stack(key[0])[0] or "decoder").ids.shape[1]
    whole = now.earlier.joined(key, value, length, axis, hidden)
    for edit in edits:
        whole = _applied(edit, key, whole, now)
    now.earlier.require_kept(key, whole, axis, hidden)
    return whole.narrow(axis, whole.shape[axis] - value.shape[axis], value.shape[axis])


def _applied(edit: Hook, key: PointKey, value: Tensor, now: Pass) -> Tensor:
    # A copy, so that an in-place edit changes only this point and nothing that shares its memory.
    copied = value.clone()
    try:
        now.in_edit = True
        edited = edit(copied)
    finally:
        now.in_edit = False
    if edited is None:
        return copied
    if not isinstance(edited, torch.Tensor):
        raise InputError(
            f"the hook at {_shown(key)} must return a tensor, or None to keep the value; it returned "
            f"{type(edited).__name__}."
        )
    if edited.shape != value.shape:
        raise InputError(
            f"the hook at {_shown(key)} must keep the shape {tuple(value.shape)}; it returned {tuple(edited.shape)}."
        )
    if dense(f"what the hook at {_shown(key)} returns", edited).is_complex():
        raise InputError(f"the hook at {_shown(key)} must return real numbers; it returned {edited.dtype}.")
    return edited.to(value)


def _shown(key: PointKey) -> str:
    name, layer = key
    return repr(name) if layer is None else repr((name, layer))
