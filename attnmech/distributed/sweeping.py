"""Runs a sweep on workers: divides the texts among them and, if there are few texts, the changes as well."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jaxtyping import Int
from safetensors.torch import load
from torch import Tensor

from ..model.run.hooked import HookedModel
from ..runs.corpus import CorpusBatch
from ..runs.engine import After, Change, Engine
from ..runs.metrics import Metric
from ..runs.progress import Steps
from ..runs.sweep import Measured, Sweeping, measured
from .pool import Pool, WorkerCall, divided, fetched
from .streaming import CallerChanges
from .worker import Piece

TASKS: Final = 32  # a sweep with enough passes is divided into at least roughly this many tasks


@dataclass(frozen=True)
class Changing:
    """The description of a call of `sweep` for a worker."""

    engine: Engine
    changes: Sequence[Change]
    judge: Metric
    in_force: CallerChanges

    def on(self, model: HookedModel, asked: "Groups") -> dict[str, Tensor]:
        """The metric before and after the changes, and everything else that is measured, group by group."""
        engine, piece = self.engine.on(model), asked.piece
        tensors_by_group: dict[str, Tensor] = {}
        with self.in_force.put(model):
            measurements = measured(engine, self.judge, self.changes, piece.on(model), piece.documents, asked.groups)
            for place, one in enumerate(measurements):
                tensors = {"before": one.before, "metric": one.after.metric}
                tensors |= {} if one.after.shift is None else {"shift": one.after.shift}
                tensors |= {} if one.after.keyless is None else {"keyless": one.after.keyless}
                tensors_by_group |= {f"{place} {name}": value for name, value in tensors.items()}
        return tensors_by_group


@dataclass(frozen=True)
class Groups:
    """The numbers of the changes to measure on a piece; the changes of a group share a pass."""

    piece: Piece
    groups: list[list[int]]


def divide(pool: Pool, key: str, sent: Any, work: Sweeping, parts: Sequence[CorpusBatch], bar: Steps) -> None:
    """Measures everything that the record of a sweep lacks, on workers."""

    def task(asked: Groups, deaths: int = 0) -> WorkerCall:
        return WorkerCall((key, [sent], asked), asked, deaths)

    def tasks() -> Iterator[WorkerCall]:
        shares = max(1, -(-TASKS // len(parts)))
        for part in parts:
            groups = work.missing(part, bar)
            piece = Piece.of(part.batch, part.documents)
            size = max(1, -(-len(groups) // shares))
            yield from (task(Groups(piece, groups[first : first + size])) for first in range(0, len(groups), size))

    waiting = tasks()
    for done, result in pool.run(lambda: next(waiting, None)):
        asked = done.request
        if result is not None:
            for measurements in _read(load(fetched(result)), asked):
                work.note(measurements, bar)
            continue
        again, left_out = divided([asked.piece], done.deaths)
        for pieces in again:
            pool.again(task(Groups(pieces[0], asked.groups), done.deaths))
        work.record.left_out |= set(left_out)


def _read(tensors: dict[str, Tensor], asked: Groups) -> Iterator[Measured]:
    documents: Int[Tensor, " text"] = asked.piece.documents
    for place, group in enumerate(asked.groups):
        after = After(tensors[f"{place} metric"], tensors.get(f"{place} shift"), tensors.get(f"{place} keyless"))
        yield Measured(documents, group, tensors[f"{place} before"], after)
