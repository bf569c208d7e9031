"""Reads many files, local or in cloud stores, as one corpus, in order; counts their documents first."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ..basics.arguments import listed, shown, string
from ..basics.messages import first_line
from ..basics.public import public
from ..errors import InputError
from .corpus import Documents
from .text_files import texts_of_file


@dataclass(frozen=True)
class StoredFile:
    """One file of a corpus, on this machine's disks or in a store that pyarrow reads (s3://, gs://, hdfs://, …)."""

    uri: str
    column: str | None = None

    def __str__(self) -> str:
        return self.uri

    @property
    def suffixes(self) -> Sequence[str]:
        """The endings of its name, which decide how it is read."""
        return PurePosixPath(self.uri).suffixes

    def open(self, mode: Literal["rb"]) -> Any:
        """Opens the file for reading; raises `OSError` if that fails."""
        if "://" not in self.uri:
            return Path(self.uri).open(mode)
        system, path = _system_of(self.uri)
        return io.BufferedReader(system.open_input_file(path))

    def texts(self) -> Iterator[str]:
        """Its documents, in order; raises `InputError` for a line that does not hold a document."""
        return texts_of_file(self, self.column)

    def counted(self) -> tuple[int, str]:
        """The number of its documents, and the SHA-256 of their texts."""
        count, digest = 0, hashlib.sha256()
        for text in self.texts():
            count += 1
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return count, digest.hexdigest()


@public
class CorpusFiles(Documents):
    """The documents of many files, in the order of the files.

    >>> corpus = CorpusFiles(["part-0.jsonl", "part-1.jsonl", "s3://bucket/more/"])      # doctest: +SKIP

    Args:
        paths: a file, a folder or a URI that pyarrow reads (s3://, gs://, abfs://, hdfs://, file://), or a list of
            them. A folder stands for all files in it and in its subfolders, sorted by name, except names that begin
            with "." or "_". The suffix of a file gives its format, as in `am.Corpus`.
        column: the column of the documents in every table, as in `am.Corpus`.

    All documents are counted and numbered before the first is run. With `engine=am.Ray(...)`, Ray Data counts and reads
    several files at once; the machines of the cluster must then be able to open the paths and reach the cloud stores.

    Raises `InputError` for paths without a file, and for files without documents.

    """

    def __init__(self, paths: str | Path | Iterable[str | Path], *, column: str | None = None) -> None:
        if column is not None:
            string("column", column)
        wanted = "a path or a list of paths"
        listed_paths = [paths] if isinstance(paths, str | Path) else listed("paths", paths, wanted)
        self.files: tuple[StoredFile, ...] = tuple(
            replace(file, column=column) for path in listed_paths for file in _files_at(path)
        )
        if not self.files:
            raise InputError(f"`paths` must be {wanted} with at least one file; got {shown(paths)}.")

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            yield from file.texts()

    @cached_property
    def counts(self) -> Sequence[tuple[int, str]]:
        """The number of documents of each file, and their SHA-256; reads all files once."""
        return [file.counted() for file in self.files]

    @property
    def count(self) -> int:
        """The number of documents."""
        return sum(count for count, _ in self.counts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digests of the files."""
        return hashlib.sha256("".join(digest for _, digest in self.counts).encode()).hexdigest()


def _system_of(uri: str) -> tuple[Any, str]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import fs
    except ImportError as error:
        raise InputError(f'to read {uri}: pip install "attnmech[parquet]".') from error
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{uri} cannot be reached ({first_line(error)}).") from error
    return system, str(path)


def _files_at(source: Any) -> list[StoredFile]:
    """The files at a path, in order of their names."""
    if not isinstance(source, str | Path):
        raise InputError(f"`paths` must hold paths; got {shown(source)} in it.")
    name = str(source)
    if "://" not in name:
        path = Path(name)
        if not path.exists():
            raise InputError(f"there is no file {path}.")
        inside = [str(file) for file in path.rglob("*") if file.is_file()] if path.is_dir() else [name]
        return [StoredFile(file) for file in _counted(inside, name)]
    from pyarrow import fs

    system, path_there = _system_of(name)
    (information,) = system.get_file_info([path_there])
    if information.type == fs.FileType.NotFound:
        raise InputError(f"there is no file {name}.")
    if information.type == fs.FileType.File:
        return [StoredFile(name)]
    inside = [file.path for file in system.get_file_info(fs.FileSelector(path_there, recursive=True)) if file.is_file]
    start = name.rstrip("/").removesuffix(path_there.rstrip("/"))
    return [StoredFile(f"{start}{file}") for file in _counted(inside, path_there)]


def _counted(files: Sequence[str], folder: str) -> list[str]:
    """The files of a folder, except those with a name in their path that begins with "." or "_"."""
    parts = {file: file.removeprefix(folder).strip("/").split("/") for file in files}
    return sorted(file for file, names in parts.items() if not any(name[:1] in (".", "_") for name in names))
