"""Runs a pass over a corpus on workers: each task reduces a few batches, and the driver adds their states in order.

The batches are those of a local run, made in the same order, so every number comes from the same passes. The driver
holds references to the results of later tasks until all earlier ones are finished, so the order of all sums depends
neither on the number of workers nor on when each finishes. The journal covers the batches up to the first unfinished
one, and a local run can resume from it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import Any, Final

from safetensors.torch import load
from torch import Tensor

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
from .pool import Pool, WorkerCall, divided, fetched
from .worker import Piece

BATCHES: Final = {8: 1, 64: 4, 512: 16}
"""The number of batches in one task, up to these numbers of tasks; `MOST` in all later tasks.

Early tasks are small, so that a small corpus is spread over the workers; later ones are larger, since each task ends
with a partial result that the driver adds. The sizes depend on nothing else, so all sums have the same order.
"""

MOST: Final = 64  # the number of batches in one task, in a long run


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
    generate: int
    in_force: CallerChanges

    def on(self, model: HookedModel, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """The states of some batches, merged."""
        work = Streaming(model, self.reducers, model.stack(self.stack or None), self.layers, self.generate)
        states: list[State] | None = None
        with self.in_force.put(model):
            for piece in pieces:
                of_piece = work.of_part(piece.on(model), piece.documents)
                numbers = piece.documents.tolist()
                states = of_piece if states is None else merged_states(self.reducers, states, of_piece, numbers)
        assert states is not None
        return tensors_of(states)


@dataclass
class _Group:
    """Batches that are reduced together, possibly in several tasks after a worker has ended."""

    parts: list[CorpusBatch]
    results: list[Any] = field(default_factory=list)
    left_out: tuple[int, ...] = ()
    waiting: int = 1

    @property
    def covered(self) -> Covered:
        return replace(reduce(Covered.then, map(Covered.of, self.parts)), left_out=self.left_out)


@dataclass(eq=False)
class Summing:
    """One pass over a corpus on workers, which have the key of their work, or fetch it."""

    pool: Pool
    key: str
    work: Any
    parts: Iterator[CorpusBatch]
    total: Total
    journal: Journal | None
    bar: Meter
    groups: dict[int, _Group] = field(default_factory=dict)
    begun: int = 0
    added: int = 0

    def run(self) -> None:
        """Adds all results to the total; if interrupted, those up to the first unfinished group are there."""
        now_and_then = Journalling(self.journal)
        for task, result in self.pool.run(self._next):
            number, pieces = task.request
            group = self.groups[number]
            group.waiting -= 1
            if result is not None:
                group.results.append(result)
            else:
                again, left_out = divided(pieces, task.deaths)
                for some in again:
                    self.pool.again(self._reduce(number, some, task.deaths))
                group.waiting += len(again)
                group.left_out += left_out
            if not group.waiting:
                for part in group.parts:
                    self.bar.advance(part)
            while (first := self.groups.get(self.added)) is not None and not first.waiting:
                self._add(first)
                now_and_then.write(self.total)
        assert not self.groups

    def _next(self) -> WorkerCall | None:
        count = next((count for tasks, count in BATCHES.items() if self.begun < tasks), MOST)
        parts = list(islice(self.parts, count))
        if not parts:
            return None
        number, self.begun = self.begun, self.begun + 1
        self.groups[number] = _Group(parts)
        return self._reduce(number, [Piece.of(part.batch, part.documents) for part in parts])

    def _reduce(self, number: int, pieces: list[Piece], deaths: int = 0) -> WorkerCall:
        return WorkerCall((self.key, [self.work], pieces), (number, pieces), deaths)

    def _add(self, group: _Group) -> None:
        """Adds the results of the first group that has not been added."""
        reducers, covered = self.total.reducers, group.covered
        states: list[State] | None = None
        for result in group.results:
            of_task = states_of(load(fetched(result)), len(reducers))
            states = of_task if states is None else merged_states(reducers, states, of_task, covered.documents)
        self.total.extend(states, covered)
        del self.groups[self.added]
        self.added += 1
