"""Shows the progress of a run on stderr, with rate and time left for a corpus; a watcher sees every step too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .corpus import CorpusBatch, Documents

Watcher: TypeAlias = Callable[[str, int, int | None], None]
"""Called after each step with the kind of step, the number done, and the total if it is known. An exception that it
raises ends the run."""

_watcher: Final[ContextVar[Watcher | None]] = ContextVar("watcher", default=None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Lets `by` watch all steps of this thread during the block."""
    before = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(before)


LOGGED_EVERY: Final = 5.0  # where stderr is not a terminal, a line of progress comes at most once in this many seconds


class _Moving:
    """A bar with one task that tells the watcher of every step, and a log of some."""

    def __init__(self, bar: Progress, description: str, total: int | None, **fields: Any) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=total, **fields)
        self._logged = 0.0

    def _tell(self) -> None:
        watcher, task, console = _watcher.get(), self._bar.tasks[0], self._bar.console
        done, total = int(task.completed), None if task.total is None else int(task.total)
        if watcher is not None:
            watcher(task.description, done, total)
        elapsed = task.elapsed or 0.0
        in_log = not (self._bar.disable or console.is_terminal or console.is_jupyter)
        if in_log and (elapsed - self._logged >= LOGGED_EVERY or (done == total and self._logged)):
            self._logged = elapsed
            of = "" if total is None else f" of {total:,}"
            console.print(f"{task.description}: {done:,}{of} after {elapsed:.0f} s", markup=False, highlight=False)


class Meter(_Moving):
    """A progress bar over documents; call `advance` after each batch."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        super().__init__(bar, "documents", total, rate="")
        self._tokens = 0

    def advance(self, part: CorpusBatch, *, skipped: bool = False) -> None:
        """Counts a batch that is done; `skipped` says that it was done before an interruption."""
        self._tokens += 0 if skipped else int(part.batch.mask.sum())
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed and self._tokens else ""
        self._bar.update(self._task, advance=len(part.documents), rate=rate)
        self._tell()


@contextmanager
def meter(inputs: Any, shard: tuple[int, int] = (0, 1), *, show: bool) -> Iterator[Meter]:
    """Shows a bar over the documents of a shard during the block; without `show`, nothing is drawn."""
    whole = (inputs.count if isinstance(inputs, Documents) else _length(inputs)) if show else None
    total = None if whole is None else len(range(whole)[shard[0] :: shard[1]])
    with _bar(TextColumn("{task.fields[rate]}"), show=show) as bar:
        yield Meter(bar, total)


def _length(inputs: Any) -> int | None:
    try:
        return len(inputs)
    except TypeError:
        return None


class Steps(_Moving):
    """A progress bar over steps; call `advance` with the number of steps done."""

    def advance(self, count: int) -> None:
        """Counts steps that are done, now or before an interruption."""
        self._bar.update(self._task, advance=count)
        self._tell()

    def reach(self, done: int | float) -> None:
        """Sets the number of steps that are done; a fraction counts part of a step."""
        self._bar.update(self._task, completed=done)
        self._tell()

    def within(self, step: int) -> Callable[[float], None]:
        """A function to call with the share of a step that is done; steps are numbered from 0."""
        return lambda share: self.reach(step + share)


@contextmanager
def steps(description: str, total: int | None, *, show: bool) -> Iterator[Steps]:
    """Shows a bar over steps, with or without a total, during the block; without `show`, nothing is drawn."""
    with _bar(show=show) as bar:
        yield Steps(bar, description, total)


def _bar(*further: TextColumn, show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(), *further,
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not show,
    )  # fmt: skip
