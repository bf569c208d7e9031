"""Where do a command's table (CSV or Parquet) and page go? Both are written, or neither."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..basics.files import check_writable, writing
from ..errors import InputError, JournalError, OutputError
from .stages import stages

if TYPE_CHECKING:
    from ..results.result import PagedResult

FORMATS = (".csv", ".parquet")


def check_table(target: Path) -> None:
    """Raises `OutputError` if no table can be written there; leaves nothing behind."""
    if target.suffix not in FORMATS:
        raise OutputError(f"a table's name must end in {' or '.join(FORMATS)}; got {target}.")
    if target.suffix == ".parquet":
        try:
            import pyarrow  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise OutputError(f'to write {target}: pip install "attnmech[parquet]", or name a .csv file.') from error
    check_writable(target)


def write_table_and_page(found: "PagedResult", table: Path, page: Path) -> None:
    """Writes a result's table, in the format given by its suffix, and its page."""
    check_table(table)
    frame = found.by_head()
    # Neither draft replaces its file before both are written.
    with writing(table) as rows:
        if table.suffix == ".csv":
            frame.to_csv(rows, index=False)
        else:
            frame.to_parquet(rows, index=False)
        with writing(page) as html:
            found.to_html(html)


class Outputs:
    """Where a command's table, its page and, until both are written, its journal go."""

    def __init__(self, table: Path) -> None:
        self.table, self.page = table, table.with_suffix(".html")
        self.journal = table.with_name(f"{table.name}.journal")

    def check(self, overwrite: bool) -> None:
        """Raises `OutputError` for what cannot be written, and for what an earlier run wrote.

        Where there is a journal, this run resumes the one that was to write them.
        """
        check_table(self.table)
        check_writable(self.page)
        self.require_free(overwrite)

    def require_free(self, overwrite: bool) -> None:
        """Raises `OutputError` for what an earlier run wrote."""
        there = [path for path in (self.table, self.page) if path.exists()]
        if there and not overwrite and not self.journal.exists():
            raise OutputError(f"{there[0]} exists; give --overwrite to replace it, or name another --out.")

    def require_no_journal(self) -> None:
        """Raises `JournalError` where an unfinished run of another kind was to write the same files."""
        if self.journal.exists():
            raise JournalError(
                f"{self.journal} holds an unfinished run that would write {self.table}. Finish it with its own "
                "command, delete it, or name another --out."
            )

    def write(self, found: "PagedResult") -> None:
        """Writes table and page."""
        write_table_and_page(found, self.table, self.page)


@contextmanager
def outputs_of(text: str | None, file: Path | None, out: Path, overwrite: bool) -> Iterator[Outputs]:
    """The outputs of a command, checked before any work; its journal is kept until the block succeeds."""
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    outputs = Outputs(out)
    outputs.check(overwrite)
    for path in (outputs.table, outputs.page, outputs.journal):
        check_apart(file, path)
    try:
        with stages("importing torch and transformers", total=1):
            from ..runs.journal import kept

        with kept(outputs.journal):
            # Another command may have written them since they were checked.
            outputs.require_free(overwrite)
            yield outputs
    except KeyboardInterrupt:
        if outputs.journal.exists():
            raise KeyboardInterrupt(f"run the same command again to resume from {outputs.journal}") from None
        raise


def check_apart(file: Path | None, out: Path) -> None:
    """Raises `OutputError` where a command would write over what it reads."""
    if file is not None and file.exists() and out.exists() and file.samefile(out):
        raise OutputError(f"cannot write {out}: it is what --file reads; name another --out.")
