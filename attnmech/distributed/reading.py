"""Reads a corpus by Ray Data: counts the documents of all files first, then reads several files at once.

Files are read ahead of the workers, within the memory limits of Ray Data; a file that changes after it was counted is
an error.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray.data import DataContext

from ..errors import InputError
from ..runs.corpus_files import CorpusFiles, StoredFile
from .pool import got

ROWS: Final = 256  # the number of documents that the driver takes at a time


class RayDocuments(CorpusFiles):
    """The documents of files that a cluster reads; its workers count several files at once."""

    def __init__(self, corpus: CorpusFiles) -> None:
        self.files = corpus.files
        count = ray.remote(num_cpus=1)(StoredFile.counted)
        self.counts = [got(call) for call in [count.remote(file) for file in self.files]]

    def __iter__(self) -> Iterator[str]:
        files, read = self.files, 0

        def texts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
            return ({"text": text} for text in files[row["item"]].texts())

        with _quietly_in_order():
            of_files = ray.data.from_items(list(range(len(files))), override_num_blocks=len(files)).flat_map(texts)
            blocks: Iterable[Any] = of_files.iter_batches(batch_size=ROWS, batch_format="pyarrow", prefetch_batches=2)
            for block in blocks:
                read += len(block)
                yield from block["text"].to_pylist()
        if read != self.count:
            raise InputError(f"{self.count} documents were counted, and {read} read: a file has changed.")


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
