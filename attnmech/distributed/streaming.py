"""Runs a pass over a corpus on workers: each task reduces a few batches, and the states are merged in a tree.

The batches are those of a local run, made in the same order, so every number comes from the same passes. The driver
holds references to partial results, and fetches the results only to write the journal. The journal covers the batches
up to the first unfinished one, and a local run can resume from it.

Leaves of that tree are numbered from 0. The neighbours 2k and 2k + 1 of one level are merged into result k of the next.
At most log2(n) results therefore wait, besides those of unfinished leaves, and the order of all sums depends neither on
the number of workers nor on when each finishes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, TypeAlias

from safetensors.torch import load
from torch import Tensor

from ..errors import EngineError
from ..interventions import Intervention
from ..model.attention.in_force import Hook
from ..model.run.hooked import HookedModel
from ..points import PointKey
from ..runs.corpus import CorpusBatch
from ..runs.journal import Journal
from ..runs.progress import Meter
from ..runs.reducer import Reducer, State
from ..runs.stream import Streaming
from ..runs.total import Covered, Journalling, Total, merged_states, states_of, tensors_of
from .pool import Done, Pool, WorkerCall, divided, fetched
from .worker import Piece

Node: TypeAlias = tuple[int, int]
"""A level and a place in it: the result covers 2^level leaves, from leaf place · 2^level on."""


@dataclass
class Tree:
    """The results that have not been merged further.

    >>> tree = Tree()
    >>> tree.add((0, 1), "b"), tree.add((0, 0), "a")
    (None, ((0, 0), (0, 1)))
    >>> tree.become((1, 0), "ab"), tree.add((0, 2), "c"), tree.prefix()
    (None, None, ['ab', 'c'])
    """

    held: dict[Node, Any] = field(default_factory=dict)
    start: int = 0
    """The first leaf whose result has not been taken."""

    def add(self, node: Node, value: Any) -> tuple[Node, Node] | None:
        """Stores a result; returns the pair that it completes, which can then be merged."""
        level, place = node
        self.held[node] = value
        sibling = (level, place ^ 1)
        return (min(node, sibling), max(node, sibling)) if sibling in self.held else None

    def become(self, node: Node, value: Any) -> tuple[Node, Node] | None:
        """Replaces a pair by its merged result; does nothing if the pair has been taken in the meantime."""
        level, place = node
        pair = [(level - 1, 2 * place), (level - 1, 2 * place + 1)]
        if not all(half in self.held for half in pair):
            return None
        for half in pair:
            del self.held[half]
        return self.add(node, value)

    def prefix(self) -> list[Any]:
        """The results, in order, that cover the leaves from `start` without a gap."""
        return [self.held[node] for node in self._prefix()]

    def take(self) -> list[Any]:
        """Removes the results of `prefix`, and returns them."""
        nodes = self._prefix()
        for level, place in nodes:
            self.start = (place + 1) << level
        return [self.held.pop(node) for node in nodes]

    def _prefix(self) -> list[Node]:
        first = {place << level: (level, place) for level, place in sorted(self.held)}
        nodes, at = [], self.start
        while at in first:
            level, place = first[at]
            nodes.append((level, place))
            at = (place + 1) << level
        return nodes


BATCHES: Final = {8: 1, 64: 4}
"""The number of batches in one task, up to these numbers of tasks; `MOST` in all later tasks.

Early tasks are small, so that a small corpus is spread over the workers; later ones are larger, since each task ends
with a partial result to merge. The sizes depend on nothing else, so the tree of merges is always the same.
"""

MOST: Final = 16
"""The number of batches in one task, in a long run."""

_MERGES: Final = 4
"""The run is abandoned once this many workers have ended on one merge."""


@dataclass(frozen=True)
class CallerChanges:
    """The hooks and interventions that are in force in the caller's context."""

    edits: tuple[tuple[PointKey, Hook], ...]
    interventions: tuple[Intervention, ...]

    @classmethod
    def of(cls, model: HookedModel) -> "CallerChanges":
        """The hooks and interventions now in force on a model."""
        return cls(model.in_force.edit_functions, model.interventions)

    def put(self, model: HookedModel) -> ExitStack:
        """Applies them to another copy of the model, until the returned stack is closed."""
        stack = ExitStack()
        stack.enter_context(model.in_force.editing(self.edits))
        if self.interventions:
            stack.enter_context(model.intervene(*self.interventions))
        return stack


@dataclass(frozen=True)
class Reducing:
    """The description of a call of `stream` for a worker."""

    reducers: tuple[Reducer, ...]
    stack: str
    layers: tuple[int, ...]
    in_force: CallerChanges

    @classmethod
    def of(cls, work: Streaming) -> "Reducing":
        """That of a call."""
        return cls(work.reducers, work.stack.label, work.layers, CallerChanges.of(work.model))

    def at(self, model: HookedModel) -> "_Reducing":
        """The same work, ready for a worker's model."""
        return _Reducing(self, Streaming(model, self.reducers, model.stack(self.stack or None), self.layers))


@dataclass(frozen=True)
class _Reducing:
    plan: Reducing
    work: Streaming

    def __call__(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """The states of some batches, merged."""
        states: list[State] | None = None
        with self.plan.in_force.put(self.work.model):
            for piece in pieces:
                of_piece = self.work.of_part(piece.on(self.work.model), piece.documents)
                numbers = piece.documents.tolist()
                states = of_piece if states is None else merged_states(self.plan.reducers, states, of_piece, numbers)
        assert states is not None
        return tensors_of(states)

    def merged(self, parts: Sequence[dict[str, Tensor]], documents: range) -> dict[str, Tensor]:
        """The states of several parts, merged."""
        first, *others = (states_of(part, len(self.plan.reducers)) for part in parts)
        for other in others:
            first = merged_states(self.plan.reducers, first, other, documents)
        return tensors_of(first)


@dataclass(frozen=True)
class _Found:
    """A partial result: the reference to it (None if all of its documents were left out), and the documents that it
    covers.
    """

    result: Any
    covered: Covered


@dataclass
class _Leaf:
    """A few batches that are being reduced, possibly in several tasks after a worker has ended."""

    parts: list[CorpusBatch]
    results: list[Any] = field(default_factory=list)
    left_out: tuple[int, ...] = ()
    waiting: int = 1

    @property
    def covered(self) -> Covered:
        """The documents that the leaf covers, when it is finished."""
        first, *others = map(Covered.of, self.parts)
        for other in others:
            first = first.then(other)
        return replace(first, left_out=self.left_out)


class Summing:
    """One pass over a corpus on workers."""

    def __init__(
        self,
        pool: Pool,
        key: str,
        work: Any,
        parts: Iterator[CorpusBatch],
        total: Total,
        journal: Journal | None,
        bar: Meter,
    ) -> None:
        self._pool, self._call, self._parts = pool, (key, [work]), parts
        self._total, self._journal, self._bar = total, journal, bar
        self._leaves: dict[int, _Leaf] = {}
        self._begun = 0
        self._tree = Tree()

    def run(self) -> None:
        """Adds all results to the total; if interrupted, adds those up to the first unfinished leaf."""
        now_and_then = Journalling(self._journal)
        try:
            for done in self._pool.run(self._next):
                if isinstance(done.task.request, _Merge):
                    self._merged(done, done.task.request)
                else:
                    self._reduced(done, done.task.request)
                if now_and_then.due and self._tree.prefix():
                    self._fold()
                    now_and_then.write(self._total)
        finally:
            self._fold()
        assert not self._leaves and not self._tree.held and self._tree.start == self._begun

    def _next(self) -> WorkerCall | None:
        """The next batches to reduce."""
        count = next((count for tasks, count in BATCHES.items() if self._begun < tasks), MOST)
        parts = list(islice(self._parts, count))
        if not parts:
            return None
        number, self._begun = self._begun, self._begun + 1
        self._leaves[number] = _Leaf(parts)
        return self._reduce(number, [Piece.of(part.batch, part.documents) for part in parts])

    def _reduce(self, number: int, pieces: list[Piece], deaths: int = 0) -> WorkerCall:
        return WorkerCall("do", (*self._call, pieces), _Reduce(number, pieces), deaths)

    def _reduced(self, done: Done, request: "_Reduce") -> None:
        leaf = self._leaves[request.leaf]
        if done.result is not None:
            leaf.results.append(done.result)
        else:
            outcome = divided(request.pieces, done.task.deaths)
            for pieces in outcome.again:
                self._pool.again(self._reduce(request.leaf, pieces, done.task.deaths))
            leaf.waiting += len(outcome.again)
            leaf.left_out += outcome.left_out
        leaf.waiting -= 1
        if leaf.waiting:
            return
        if len(leaf.results) > 1:
            self._merge(_Merge((0, request.leaf), leaf.covered), leaf.results)
        else:
            self._leaf_done(request.leaf, leaf.results[0] if leaf.results else None)

    def _leaf_done(self, number: int, result: Any) -> None:
        leaf = self._leaves.pop(number)
        for part in leaf.parts:
            self._bar.advance(part)
        self._pair(self._tree.add((0, number), _Found(result, leaf.covered)))

    def _merge(self, request: "_Merge", results: Sequence[Any]) -> None:
        self._pool.again(WorkerCall("merge", (*self._call, request.covered.documents, *results), request))

    def _pair(self, pair: tuple[Node, Node] | None) -> None:
        """Starts the merge of two neighbours; does nothing without a pair."""
        while pair is not None:
            one, other = (self._tree.held[node] for node in pair)
            level, place = pair[1]
            node, covered = (level + 1, place // 2), one.covered.then(other.covered)
            results = [half.result for half in (one, other) if half.result is not None]
            if len(results) == 2:
                self._merge(_Merge(node, covered), results)
                return
            pair = self._tree.become(node, _Found(results[0] if results else None, covered))

    def _merged(self, done: Done, request: "_Merge") -> None:
        if done.result is None:
            if done.task.deaths >= _MERGES:
                raise EngineError(
                    f"{_MERGES} workers ended while they merged partial results, usually for want of memory. Use fewer "
                    f"workers, or fewer reducers."
                )
            self._pool.again(done.task)
        elif request.node[0] == 0:
            self._leaf_done(request.node[1], done.result)
        else:
            self._pair(self._tree.become(request.node, _Found(done.result, request.covered)))

    def _fold(self) -> None:
        """Adds the results up to the first unfinished leaf to the total."""
        for partial in self._tree.take():
            states = None
            if partial.result is not None:
                states = states_of(load(fetched(partial.result)), len(self._total.reducers))
            self._total.extend(states, partial.covered)


@dataclass(frozen=True)
class _Reduce:
    """A task that reduces pieces of a leaf."""

    leaf: int
    pieces: list[Piece]


@dataclass(frozen=True)
class _Merge:
    """A task that merges two results into that of a node."""

    node: Node
    covered: Covered
