"""Reads a corpus by Ray Data: counts the documents of all files first, so that each has its number, then reads blocks.

Several files are read at once and ahead of the workers, within the memory limits of Ray Data. Documents carry their
numbers, and a file that changes between counting and reading is an error.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Final

import pyarrow  # type: ignore[import-untyped]
import ray
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from ..errors import InputError
from ..runs.corpus_files import CorpusFiles, CountedFiles, StoredFile
from .pool import got

ROWS: Final = 256
"""The number of documents in a block."""


class RayDocuments(CountedFiles):
    """The documents of files that a cluster reads."""

    def __init__(self, corpus: CorpusFiles) -> None:
        self.files = corpus.files
        count = ray.remote(num_cpus=1)(StoredFile.counted)
        self._counts = [got(call) for call in [count.remote(file) for file in self.files]]

    @property
    def counts(self) -> Sequence[tuple[int, str]]:
        """As `CountedFiles.counts`; Ray's workers count several files at once."""
        return self._counts

    def __iter__(self) -> Iterator[str]:
        numbers = [count for count, _ in self.counts]
        firsts = list(accumulate(numbers, initial=0))[:-1]
        expected = 0
        with _quietly_in_order():
            read = ray.data.read_datasource(_Files(list(zip(self.files, firsts, numbers, strict=True))))
            for block in read.iter_batches(batch_size=ROWS, batch_format="pyarrow", prefetch_batches=2):
                for number, text in zip(block["number"].to_pylist(), block["text"].to_pylist(), strict=True):
                    if number != expected:
                        raise InputError(
                            f"document {expected} was counted, but is no longer there: a file changed while it was "
                            f"read."
                        )
                    expected += 1
                    yield text
        if expected != sum(numbers):
            raise InputError(f"{sum(numbers)} documents were counted, and {expected} read: a file has changed.")


class _Files(Datasource):
    """Files, each with the number of its first document and its number of documents."""

    def __init__(self, files: Sequence[tuple[StoredFile, int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = files

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
        """One task for each file."""
        return [
            ReadTask(partial(_blocks, file, first), BlockMetadata(count, None, None, None))
            for file, first, count in self._files
        ]


def _blocks(file: StoredFile, first: int) -> Iterator[Any]:
    """The documents of a file with their numbers, in tables."""
    schema = pyarrow.schema([("number", pyarrow.int64()), ("text", pyarrow.large_string())])
    rows: list[str] = []
    for text in file.texts():
        rows.append(text)
        if len(rows) == ROWS:
            yield pyarrow.table([range(first, first + len(rows)), rows], schema=schema)
            first, rows = first + len(rows), []
    if rows:
        yield pyarrow.table([range(first, first + len(rows)), rows], schema=schema)


@contextmanager
def _quietly_in_order() -> Iterator[None]:
    """Sets up Ray Data within the block: blocks in order, no progress bars, no reports."""
    context, log = DataContext.get_current(), logging.getLogger("ray.data")
    before = context.execution_options.preserve_order, context.enable_progress_bars, log.level
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars, level = before
        log.setLevel(level)
