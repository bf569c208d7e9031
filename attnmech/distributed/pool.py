"""Assigns tasks to workers; a worker that ends is restarted, and its tasks are assigned again.

Every task counts exactly once: its result comes from the call that returned it, and a call whose worker ended returns
nothing.

Documents on which a worker ended are tried again: first all together, then in ever smaller parts. The first time, the
worker may have ended for another reason, so all its documents are assigned again, in the same batches. From the second
time on, one of the documents is suspected: each part is assigned separately, and a part that ends a worker is divided
further. A document is left out when it makes up a part by itself and four workers have ended on it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..basics.messages import first_line
from ..errors import AttnmechError, EngineError
from .worker import Piece

_AGAIN: Final = 2  # documents are divided once this many workers have ended on them

_MOST: Final = 4  # a document is left out once this many workers ended on it, the last of them on it alone

_PARTS: Final = 16  # the maximum number of parts into which documents are divided


def divided(pieces: Sequence[Piece], deaths: int) -> tuple[list[list[Piece]], tuple[int, ...]]:
    """Decides, after `deaths` workers have ended on documents, which parts to assign again, each separately, and the
    number of the document to leave out.
    """
    count = sum(len(piece.documents) for piece in pieces)
    if count == 1 and deaths >= _MOST:
        return [], tuple(pieces[0].documents.tolist())
    if count == 1 or deaths < _AGAIN:
        return [list(pieces)], ()
    size = -(-count // _PARTS)
    places = [(piece, torch.split(torch.arange(len(piece.documents)), size)) for piece in pieces]
    return [[piece.part(some)] for piece, parts in places for some in parts], ()


AT_ONCE: Final = 2  # a worker has this many tasks assigned at a time, so that it need not wait for the next


@dataclass(eq=False)
class WorkerCall:
    """One call of `Worker.do`."""

    arguments: tuple[Any, ...]
    request: Any  # the caller's record of the call
    deaths: int = 0  # the number of workers that have ended on this call


Done: TypeAlias = tuple[WorkerCall, Any]  # a finished task, with a reference to its result; None if its worker ended

Feed: TypeAlias = Callable[[], WorkerCall | None]  # the next task; None if there is none at the moment


@dataclass(eq=False)
class _Seat:
    worker: Any
    ready: bool = False
    starting: Any = None  # the current call that loads the model
    queue: deque[tuple[Any, Any, WorkerCall]] = field(default_factory=deque)
    """The current calls, oldest first: whether the worker had the model, the reference to the result, the task."""


class Pool:
    """Workers that load one model and carry out tasks; `prepare` makes the call that loads it on a worker."""

    def __init__(self, workers: Sequence[Any], prepare: Callable[[Any], Any]) -> None:
        self._seats = [_Seat(worker) for worker in workers]
        self._prepare = prepare
        self._again: deque[WorkerCall] = deque()

    def again(self, task: WorkerCall) -> None:
        """Assigns a task again, before all others."""
        self._again.append(task)

    def run(self, feed: Feed) -> Iterator[Done]:
        """Carries out tasks until none are left; yields those whose worker ended too, with `deaths` increased."""
        for seat in self._seats:
            self._start(seat)
        while True:
            for seat in sorted(self._seats, key=lambda seat: len(seat.queue)):
                self._fill(seat, feed)
            calls = [seat.queue[0][0] for seat in self._seats if seat.queue]
            calls += [seat.starting for seat in self._seats if seat.starting is not None]
            if not any(seat.queue for seat in self._seats) and not (self._more(feed)):
                return
            if calls:
                ray.wait(calls, num_returns=1)
            for seat in self._seats:
                yield from self._heard(seat)

    def _more(self, feed: Feed) -> bool:
        """Whether tasks are left; called when no worker has one."""
        if not self._again and (task := feed()) is not None:
            self._again.append(task)
        return bool(self._again)

    def _start(self, seat: _Seat) -> None:
        seat.ready, seat.starting = False, self._prepare(seat.worker)

    def _fill(self, seat: _Seat, feed: Feed) -> None:
        while seat.ready and len(seat.queue) < AT_ONCE:
            task = self._again.popleft() if self._again else feed()
            if task is None:
                return
            # Ray does not retry: if a worker ends, this pool decides what happens to its tasks.
            done, result = seat.worker.do.options(num_returns=2, max_task_retries=0).remote(*task.arguments)
            seat.queue.append((done, result, task))

    def _heard(self, seat: _Seat) -> Iterator[Done]:
        """The calls that a worker has finished since the last poll."""
        if seat.starting is not None:
            self._started(seat)
        while seat.queue and _is_there(seat.queue[0][0]):
            done, result, task = seat.queue.popleft()
            try:
                had_model = got(done)
            except RayActorError:
                had_model = False
            if not had_model:  # the worker has ended, and perhaps been restarted
                self._again.extend(waiting for _, _, waiting in seat.queue)
                seat.queue.clear()
                self._start(seat)
                task.deaths += 1
                yield task, None
                return
            yield task, result

    def _started(self, seat: _Seat) -> None:
        if not _is_there(seat.starting):
            return
        try:
            loaded = got(seat.starting)
        except RayActorError as error:
            raise EngineError(
                "workers end while they load the model, usually for want of memory "
                f"({first_line(error)}). Use fewer workers, or a smaller `dtype`."
            ) from error
        if not loaded:
            raise EngineError("a restarted worker no longer finds the model on its disk; run the call again.")
        seat.ready, seat.starting = True, None


def _is_there(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])


def got(call: Any) -> Any:
    """What a call returned. If it raised, raises the same here; attnmech's own errors are raised unchanged."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, AttnmechError):
            raise error.cause from None
        raise error.cause from error
    except RayActorError:
        raise
    except RayError as error:
        raise lost(error) from error


def fetched(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayError as error:
        raise lost(error) from error


def lost(error: Exception) -> EngineError:
    """The error to raise if Ray lost the result of a finished task."""
    return EngineError(
        f"Ray lost a machine that held partial results, or the connection to the cluster ({first_line(error)}). "
        "No result was returned; with journal=..., the same call resumes from the journal."
    )
