"""Holds the merged states of the batches of a corpus so far, in the form in which a journal stores them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .corpus import CorpusBatch
from .journal import Entry, Journal
from .reducer import Reducer, State
from .states import merged

_JOURNAL_SHARE: Final = 0.05  # writing the journal takes roughly this share of the time at most
_LEFT_OUT: Final = "left out"  # the name under which a journal stores the numbers of the documents that were left out


@dataclass(frozen=True)
class Covered:
    """The part of a corpus that some states cover."""

    batches: int
    documents: range  # a range that begins at the smallest number of a document, with one entry for each document
    truncated: int
    digest: str  # `CorpusBatch.digest` of the last batch
    left_out: tuple[int, ...] = ()  # the numbers of documents on which workers ended; they are included in `documents`

    @classmethod
    def of(cls, part: CorpusBatch) -> "Covered":
        first = int(part.documents.min())
        return cls(1, range(first, first + len(part.documents)), part.truncated, part.digest)

    def then(self, other: "Covered") -> "Covered":
        """This part together with the batches that follow it."""
        first = min(self.documents.start, other.documents.start)
        count = len(self.documents) + len(other.documents)
        return Covered(
            self.batches + other.batches,
            range(first, first + count),
            self.truncated + other.truncated,
            other.digest,
            self.left_out + other.left_out,
        )


class Total:
    """The merged states of the batches so far."""

    def __init__(self, reducers: Sequence[Reducer], done: Entry | None) -> None:
        self.reducers = reducers
        self.states: list[State] | None = None
        self.batches = self.documents = self.truncated = 0
        self.digest = ""
        self.left_out: list[int] = []  # the numbers of the documents on which workers ended
        self.fresh = False  # whether it holds anything that the journal does not
        if done is not None:
            self.batches, self.digest = done.batches, done.digest
            self.documents, self.truncated = done.counters["documents"], done.counters["truncated"]
            self.left_out = done.tensors[_LEFT_OUT].tolist() if _LEFT_OUT in done.tensors else []
            self.states = states_of(done.tensors, len(reducers))

    def extend(self, states: list[State] | None, covered: "Covered") -> None:
        """Merges the states of the next batches; `states` is None if none of their documents was finished."""
        # A merge may change its first argument; if it is interrupted, a half-merged state must not get into the
        # journal.
        self.fresh = False
        if self.states is None:
            self.states = states
        elif states is not None:
            self.states = merged_states(self.reducers, self.states, states, covered.documents)
        self.batches += covered.batches
        self.documents += len(covered.documents) - len(covered.left_out)
        self.truncated += covered.truncated
        self.left_out += covered.left_out
        self.digest = covered.digest
        self.fresh = self.states is not None

    def entry(self) -> Entry:
        tensors = tensors_of(self.states or ())
        if self.left_out:
            tensors[_LEFT_OUT] = torch.tensor(self.left_out)
        return Entry(tensors, self.batches, self.digest, {"documents": self.documents, "truncated": self.truncated})


class Journalling:
    """Writes a run's journal from time to time, using a bounded share of the time."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal, self._spent, self._since = journal, 0.0, time.perf_counter()

    def write(self, total: "Total") -> None:
        """Writes the states so far, if it is time to."""
        before = time.perf_counter()
        if self._journal is None or self._spent > _JOURNAL_SHARE * (before - self._since):
            return
        self._journal.write(total.entry())
        total.fresh = False
        self._spent, self._since = time.perf_counter() - before, time.perf_counter()


def tensors_of(states: Sequence[State]) -> dict[str, Tensor]:
    """The tensors of all states, each under the place of its reducer and its name."""
    return {f"{place} {name}": value for place, state in enumerate(states) for name, value in state.items()}


def states_of(tensors: Mapping[str, Tensor], reducers: int) -> list[State]:
    """The reverse of `tensors_of`, for that many reducers."""
    return [
        {name.split(" ", 1)[1]: value for name, value in tensors.items() if name.startswith(f"{place} ")}
        for place in range(reducers)
    ]


def merged_states(
    reducers: Sequence[Reducer], one: list[State], other: list[State], documents: Sequence[int]
) -> list[State]:
    """Merges the states of two parts of a corpus; `documents` are those of the second part, for error messages."""
    return [merged(*of_reducer, documents) for of_reducer in zip(reducers, one, other, strict=True)]
