"""Writes the journal of a run: a file with everything that the run needs to resume after an interruption."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from ..basics.files import check_writable, path_of
from ..basics.messages import first_line
from ..errors import JournalError, OutputError
from ..results.tensor_file import check_whole, read_tensors, write_tensors

ADVICE: Final = "Give another path or delete it."

_ROUNDING: Final = 1000
"""Two runs of one measurement may differ by this many epsilons of the model's precision, absolute plus relative: in a
deep model, different batch shapes change the numbers by this much."""

_MOST_ROUNDING: Final = 0.1  # in any precision, two runs may differ by this much at most: half precision has few digits


P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class _Kept:
    """A journal that this run owns."""

    stays: bool = False  # whether the file is still needed after the run has ended


_KEPT: ContextVar[Mapping[Path, _Kept]] = ContextVar("attnmech_journals", default={})  # noqa: B039 - never changed


@contextmanager
def kept(path: str | Path | None) -> Iterator[None]:
    """Owns the journal at a path during the block, and removes the file if the block succeeds.

    >>> with kept("table.csv.journal"):                             # doctest: +SKIP
    ...     am.ablate_heads(model, texts, journal="table.csv.journal").write_html("page.html")

    If blocks for the same path are nested, the outer block removes the file, so a caller that writes a run's result can
    keep the journal until the result is written. After an exception or Ctrl-C, the journal remains, and the traceback
    of Ctrl-C ends with its path. Without a path, nothing happens.

    Raises `JournalError` at once if another process or thread owns the journal, and `OutputError` if none can be
    written.
    """
    if path is None or (real := _real(path_of(path))) in _KEPT.get():
        yield
        return
    with _locked(Path(path), real):
        mine = _Kept()
        _KEPT.set({**_KEPT.get(), real: mine})
        try:
            yield
        except KeyboardInterrupt as stop:
            if real.exists():
                stop.add_note(f"The finished part is in {path}: the same call resumes from it.")
            raise
        finally:
            _KEPT.set({other: held for other, held in _KEPT.get().items() if other != real})
        if not mine.stays:
            real.unlink(missing_ok=True)


def leave(path: str | Path | None) -> None:
    """Keeps the journal at a path after its `kept` ends, since the returned result is incomplete."""
    if path is not None:
        _KEPT.get()[_real(path)].stays = True


def owning_journal(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function own, while it runs, the journal that its keyword argument `journal` names."""

    @wraps(function)
    def owned(*arguments: P.args, **options: P.kwargs) -> R:
        with kept(cast(str | Path | None, options.get("journal"))):
            return function(*arguments, **options)

    return owned


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


@contextmanager
def _locked(path: Path, real: Path) -> Iterator[None]:
    """Holds a lock, which the system releases if the process dies; leaves no file behind."""
    check_writable(path)
    lock = FileLock(real.with_name(f".{real.name}.lock"), blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise JournalError(
            f"{path} is in use by another run. Wait until it has finished, or give another path."
        ) from None
    except OSError as error:
        raise OutputError(f"cannot lock {path}: {error.strerror or error}.") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove open files
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@dataclass(frozen=True)
class Entry:
    """The progress of a run."""

    tensors: Mapping[str, Tensor]  # everything that the run has accumulated, under any names
    batches: int  # the number of batches that the entry covers
    digest: str  # `CorpusBatch.digest` of the last batch
    counters: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """One file with the last entry of a run, written whole or not at all.

    `identity` identifies the run by JSON values: only a run with the same identity resumes from the file.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._identity = {name: _written(value) for name, value in identity.items()}

    def write(self, entry: Entry) -> None:
        """Replaces the last entry; a run killed here leaves the old one intact."""
        # Numbered, since safetensors reserves some names.
        tensors = {str(number): value for number, value in enumerate(entry.tensors.values())}
        header = {
            "kind": type(self).__name__,
            "identity": self._identity,
            "names": list(entry.tensors),
            "batches": entry.batches,
            "digest": entry.digest,
            "counters": dict(entry.counters),
        }
        write_tensors(self.path, tensors, header, sync=True)

    def resume(self) -> Entry | None:
        """The last entry, or None if there is no file.

        Raises `JournalError`, and leaves the file unchanged, if it is another run's journal, is damaged, or is not a
        journal.
        """
        if not self.path.exists():
            return None
        try:
            check_whole(self.path)
            tensors, header = read_tensors(self.path)
            entry = Entry(
                # Copied, since memory-mapped tensors would change with the file.
                {name: tensors[str(number)].clone() for number, name in enumerate(header["names"])},
                header["batches"],
                header["digest"],
                header["counters"],
            )
        except Exception as error:
            raise JournalError(f"{self.path} is not a valid journal ({first_line(error)}). {ADVICE}") from error
        self._check(header["identity"])
        return entry

    def require_same(self, names: Sequence[str], held: Tensor, measured: Tensor, precision: torch.dtype) -> None:
        """Raises `JournalError` if any of the numbers in `names`, measured again, differs from its value in the
        journal.

        The same code gives bit-identical numbers on a CPU. On a GPU, or if texts and changes are batched differently
        (`memory`), numbers agree up to rounding; the tolerance follows from the model's precision.
        """
        allowed = min(_ROUNDING * torch.finfo(precision).eps, _MOST_ROUNDING)
        apart = ~torch.isclose(measured, held, rtol=allowed, atol=allowed, equal_nan=True)
        if bool(apart.any()):
            first = int(apart.flatten().int().argmax())
            was, now = float(held.flatten()[first]), float(measured.flatten()[first])
            raise JournalError(
                f"{self.path} disagrees with this run: {names[first]} is {was:.6g} in the journal, but {now:.6g} now. "
                f"The metric, a hook or the model has changed, or is random. {ADVICE}"
            )

    def _check(self, held: Mapping[str, str]) -> None:
        differences = [
            f"{name}: expected {self._identity.get(name, 'none')}, the journal has {held.get(name, 'none')}"
            for name in [*self._identity, *(name for name in held if name not in self._identity)]
            if self._identity.get(name) != held.get(name)
        ]
        if differences:
            raise JournalError(f"{self.path} is the journal of another run. {'; '.join(differences)}. {ADVICE}")


def _written(value: Any) -> str:
    """A value as canonical JSON."""
    return json.dumps(value, sort_keys=True)
