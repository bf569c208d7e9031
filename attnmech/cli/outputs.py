"""Writes what a command measured: a page, a table or a saved result, by the suffix of each `--out`. All files are
written, or none.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..basics.files import check_writable, writing
from ..errors import InputError, JournalError, OutputError
from .stages import importing, interrupt_in

if TYPE_CHECKING:
    import pandas as pd

CONTENTS: Final = {
    "": "folder with a page",
    ".html": "page",
    ".csv": "table",
    ".parquet": "table",
    ".safetensors": "result for Python",
}
"""The contents of a file, by its suffix."""

TABLE: Final = (".csv", ".parquet")
REPORT: Final = (".html", *TABLE)
RESULT: Final = (*REPORT, ".safetensors")
ATLAS: Final = ("", *REPORT)
KV: Final = ("", *RESULT)

FOLLOWS: Final = "the types of heads and the effects of ablations follow."
"""What a report's first page lacks."""

INDEX: Final = "index.html"
"""The page in a folder."""

FILES: Final = {
    "report": [Path("report.html")],
    "check": [],
    "atlas": [Path("atlas")],
    "kv": [Path("kv")],
    **{
        command: [Path(f"{command}.csv"), Path(f"{command}.html")]
        for command in ("focus", "drift", "heads", "embed", "ablate", "null")
    },
}
"""The files that each command writes without `--out`."""


class Outputs:
    """The files of a command and, until all are written, the journal beside the first."""

    def __init__(self, paths: Sequence[Path] = (), *, overwrite: bool = False, resumable: bool = False) -> None:
        self.paths, self._overwrite, self._resumable = tuple(paths), overwrite, resumable
        self.place = paths[0].parent / f"{paths[0].name}.journal" if paths else None
        """The path of the journal, if this or another run writes one."""
        self.early: list[Path] = []
        """The pages that `begin` wrote."""

    @property
    def journal(self) -> Path | None:
        """The journal that this run writes."""
        return self.place if self._resumable else None

    def check(self, suffixes: Sequence[str], source: Path | None) -> None:
        """Raises `InputError` for a file that this command cannot write; leaves no files behind."""
        for path in self.paths:
            if path.suffix.lower() not in suffixes:
                raise InputError(f"--out must end in {listed(suffixes)}; got {path}.")
            if path.suffix.lower() == ".parquet":
                _require_pyarrow(path)
            try:
                check_writable(_page_of(path))
            except OutputError as error:
                raise InputError(str(error)) from error
        names = [os.path.realpath(path) for path in self.paths]
        for path, name in zip(self.paths, names, strict=True):
            if names.count(name) > 1:
                raise InputError(f"--out names {path} more than once; name each file once.")
        for path in (*self.paths, *([self.place] if self.place else [])):
            if source is not None and source.exists() and path.exists() and source.samefile(path):
                raise InputError(f"cannot write {path}: --file reads it. Name another --out.")
        self.require_free()

    def require_free(self) -> None:
        """Raises `InputError` for a file that exists, and `JournalError` for the journal of another kind of run.

        A run that resumes from its journal may find files that an earlier attempt wrote.
        """
        journal = self.place is not None and self.place.exists()
        if journal and not self._resumable:
            raise JournalError(
                f"{self.place} holds an unfinished run that would write {self.paths[0]}. Finish it with its own "
                "command, delete it, or name another --out."
            )
        existing = [path for path in self.paths if _page_of(path).exists()]
        if existing and not self._overwrite and not journal:
            raise InputError(f"{existing[0]} exists; give --overwrite to replace it, or name another --out.")

    def begin(self, page: Callable[[], str]) -> list[Path]:
        """Writes the pages early; `write` replaces them."""
        self.early = [path.resolve() for path in self.paths if path.suffix.lower() == ".html"]
        for path in self.early:
            with writing(path) as draft:
                draft.write_text(page(), encoding="utf-8")
        return self.early

    def write(self, table: "pd.DataFrame", others: Mapping[str, Callable[[Path], object]] | None = None) -> None:
        """Writes all files before replacing any; `others` write files other than tables, by suffix."""
        writers: dict[str, Callable[[Path], object]] = {
            ".csv": lambda path: table.to_csv(path, index=False),
            ".parquet": lambda path: table.to_parquet(path, index=False),
            **(others or {}),
        }
        with ExitStack() as drafts:
            for path in sorted(self.paths, key=lambda path: not path.suffix):
                is_folder = not path.suffix  # which is written whole or not at all, after the drafts of the files
                writers[path.suffix.lower()](path if is_folder else drafts.enter_context(writing(path)))

    @property
    def names(self) -> list[str]:
        """The absolute paths of the files."""
        return [str(path.resolve()) for path in self.paths]


@contextmanager
def outputs_of(
    paths: Sequence[Path],
    suffixes: Sequence[str],
    *,
    overwrite: bool,
    source: Path | None = None,
    resumable: bool = False,
) -> Iterator[Outputs]:
    """Yields the outputs of a command, checked before any work; the journal is removed when the block succeeds."""
    outputs = Outputs(paths, overwrite=overwrite, resumable=resumable)
    outputs.check(suffixes, source)
    try:
        with importing():
            from ..model.files import load  # noqa: F401 - what takes long of all that a command imports
            from ..runs.journal import kept

        with kept(outputs.place):
            # Another command may have written these files since they were checked.
            outputs.require_free()
            yield outputs
    except BaseException as error:
        if interrupt_in(error) and outputs.place is not None and outputs.place.exists():
            raise KeyboardInterrupt(f"run the same command again to resume from {outputs.place}") from None
        if interrupt_in(error) and outputs.early:
            raise KeyboardInterrupt(f"{outputs.early[0]} stays without them") from None
        raise


def listed(suffixes: Iterable[str]) -> str:
    """Lists suffixes, each with the contents of its file.

    >>> listed(TABLE)
    '.csv (table) or .parquet (table)'
    """
    *others, last = (f"{suffix or 'no suffix'} ({CONTENTS[suffix]})" for suffix in suffixes)
    return f"{', '.join(others)} or {last}"


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise InputError(f'to write {path}: pip install "attnmech[parquet]", or name a .csv file.') from error


def _page_of(path: Path) -> Path:
    """The page in a folder that exists; else the path itself."""
    return path / INDEX if path.is_dir() and not path.suffix else path
