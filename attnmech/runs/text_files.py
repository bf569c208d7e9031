"""Reads the documents of a file: lines of text, JSON, CSV, TSV or Parquet, by the suffix of its name.

One rule chooses the column of a table or of records: the named one; else "text"; else the only one that holds strings.
"""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain, islice
from typing import Any, Final, Literal, Protocol, runtime_checkable

from ..basics.arguments import shown
from ..basics.messages import first_line
from ..errors import InputError

ROWS_AT_ONCE: Final = 256
"""This many rows of a Parquet file are in memory at once; this many of a CSV file show which columns hold text."""

READ_AT_ONCE: Final = 2**16  # this many bytes of a Parquet file are read at once

_COLUMN: Final = "text"
_LONGEST_CELL: Final = 2**31 - 1
_BOM: Final = codecs.BOM_UTF8.decode()  # some editors put it at the start of UTF-8 files; it is not part of the text


@runtime_checkable
class Readable(Protocol):
    """A file that can be read: a `Path`, or a file in a store; `str` gives its name."""

    @property
    def suffixes(self) -> Sequence[str]:
        """The endings of its name."""

    def open(self, mode: Literal["rb"]) -> Any:
        """The file."""


def texts_of_file(path: Readable, column: str | None = None) -> Iterator[str]:
    """The documents of a file, without blank ones; `column` names the column of a table or of records.

    Raises `InputError` for a suffix that is not known, and while reading.
    """
    endings = [suffix.lower() for suffix in path.suffixes]
    unpack = _COMPRESSED.get(endings[-1]) if endings else None
    suffix = "".join(endings[-2:-1] if unpack else endings[-1:])
    if suffix in PLAIN:
        if column is not None:
            raise InputError(f"{path} is read line by line, so it has no column {shown(column)}; leave `column` out.")
        texts: Iterator[str] = (line.removesuffix("\n").removesuffix("\r") for line in _lines(path, unpack))
    elif suffix in _TABLES and not (unpack and suffix == ".parquet"):
        texts = _TABLES[suffix](path, unpack, column)
    else:
        raise InputError(
            f"{path} ends in {''.join(path.suffixes[-2:] if unpack else path.suffixes[-1:])}, which attnmech does not "
            f"read. Save its texts as {', '.join(_TABLES)}, or as .txt with one document per line."
        )
    return (text for text in texts if text.strip())


Unpack = Callable[[Any], Any] | None  # opens a compressed file from its bytes; None for a file that is not compressed

_COMPRESSED: Final[Mapping[str, Callable[[Any], Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def opened(path: Readable) -> BufferedReader:
    """The file; raises `InputError` if it cannot be read."""
    try:
        file: BufferedReader = path.open("rb")
        return file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error


def _raw_lines(path: Readable, unpack: Unpack) -> Iterator[bytes]:
    with opened(path) as file:
        if unpack is None:
            yield from file
            return
        try:
            with unpack(file) as content:
                yield from content
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise InputError(f"{path} cannot be decompressed ({first_line(error)}).") from error


def _lines(path: Readable, unpack: Unpack) -> Iterator[str]:
    """Every line of a file, with its \\n or \\r\\n; only these end a line."""
    offset = 0
    for number, line in enumerate(_raw_lines(path, unpack), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise InputError(
                f"{path} is not UTF-8: line {number} has the byte {line[error.start]:#04x} at offset {at} of the "
                "file. Save it as UTF-8."
            ) from error
        offset += len(line)
        yield text.removeprefix(_BOM if number == 1 else "")


def _json_lines(path: Readable, unpack: Unpack, column: str | None) -> Iterator[str]:
    def values() -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(_lines(path, unpack), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where} is not JSON ({first_line(error)}); give one JSON value per line.") from error

    return _texts_of_values(values(), column)


def _json(path: Readable, unpack: Unpack, column: str | None) -> Iterator[str]:
    """The documents of one JSON list; a file with a JSON value per line is read as .jsonl is."""
    try:
        content = json.loads("".join(_lines(path, unpack)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            yield from _json_lines(path, unpack, column)
            return
        raise InputError(f"{path} is not JSON ({first_line(error)}).") from error
    if isinstance(content, str) or (isinstance(content, dict) and isinstance(content.get(column or _COLUMN), str)):
        content = [content]
    if not isinstance(content, list):
        kind = "an object" if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} must hold a JSON list of texts or of objects; got {kind}.")
    yield from _texts_of_values(((f"{path}, entry {number}", value) for number, value in enumerate(content)), column)


def _texts_of_values(values: Iterable[tuple[str, Any]], column: str | None) -> Iterator[str]:
    """The texts of JSON values, strings or objects; the first object shows which column holds texts."""
    for where, value in values:
        if isinstance(value, dict):
            if column is None:
                column = _chosen(where, value, [name for name, held in value.items() if isinstance(held, str)], None)
            if column not in value:
                raise InputError(f'{where} has no "{column}"; it has {_listed(value)}.')
            yield text_of(value[column], where)
        else:
            yield text_of(value, where)


def _chosen(where: Any, columns: Iterable[str], of_text: Sequence[str], column: str | None) -> str:
    names = list(columns)
    wanted = _COLUMN if column is None and _COLUMN in names else column
    if wanted is None:
        if len(of_text) == 1:
            return of_text[0]
        several = f"{len(of_text)} other columns of texts" if of_text else "no other column of texts"
        raise InputError(
            f'{where} has no "{_COLUMN}", and {several}; its columns are {_listed(names)}. Give the option column the '
            f'name of one, or rename it to "{_COLUMN}".'
        )
    if names.count(wanted) != 1:
        count = f"{names.count(wanted)} columns" if wanted in names else "no column"
        raise InputError(f'{where} has {count} "{wanted}"; its columns are {_listed(names)}.')
    return wanted


def _separated(separators: str) -> Callable[[Readable, Unpack, str | None], Iterator[str]]:
    """Reads tables whose cells are separated by the first of some characters that the header has."""

    def read(path: Readable, unpack: Unpack, column: str | None) -> Iterator[str]:
        lines = iter(_lines(path, unpack))
        begin: list[str] = []
        while not begin or (begin[-1] and not begin[-1].strip()):
            begin.append(next(lines, ""))
        delimiter = next((mark for mark in separators if _is_between_cells(mark, begin[-1])), separators[0])
        rows = _rows(path, csv.reader(chain(begin, lines), delimiter=delimiter, strict=True))
        _, header = next(rows, (0, []))
        sample = list(islice(rows, ROWS_AT_ONCE))
        of_text = [name for place, name in enumerate(header) if any(not _is_number(row[place]) for _, row in sample)]
        chosen = _chosen(path, header, header if len(header) == 1 else of_text, column) if header else ""
        numbers = [cell for cell in header if cell and cell != chosen and _is_number(cell)]
        if numbers and column is None and chosen != _COLUMN:
            raise InputError(
                f"{path} seems to have no header: its first row holds the number {numbers[0]!r}. Add a first row with "
                "the names of the columns, or give the option column."
            )
        place = header.index(chosen) if header else 0
        yield from (row[place] for _, row in chain(sample, rows))

    return read


def _is_between_cells(mark: str, line: str) -> bool:
    try:
        return len(next(csv.reader([line], delimiter=mark), [])) > 1
    except csv.Error:  # which the reading of the rows explains
        return False


def _rows(path: Readable, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not blank, each with the line on which it ends; all have the header's cells."""
    cells = 0
    while True:
        # The limit belongs to the process, so it is only changed for the reading of one row.
        limit = csv.field_size_limit(_LONGEST_CELL)
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(
                f"{path}, line {reader.line_num}, is not a row of a table ({first_line(error)}). Put texts that "
                "contain separators, quotes or line ends in quotes, and double the quotes in them."
            ) from error
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if not any(cell.strip() for cell in row):
            continue
        cells = cells or len(row)
        if len(row) != cells:
            raise InputError(
                f"{path}: the header has {cells} column{'s' * (cells != 1)}, but the row that ends on line "
                f"{reader.line_num} has {len(row)}. Put texts that contain separators in quotes."
            )
        yield reader.line_num, row


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, or empty."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True


def _parquet(path: Readable, unpack: Unpack, column: str | None) -> Iterator[str]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(f'to read {path}: pip install "attnmech[parquet]".') from error
    try:
        # By default, a whole row group would be read at once, often the whole file.
        bounded = {"buffer_size": READ_AT_ONCE, "pre_buffer": False}
        with opened(path) as file, parquet.ParquetFile(file, **bounded) as table:
            schema = table.schema_arrow
            chosen = _chosen(path, schema.names, [field.name for field in schema if _holds_text(field.type)], column)
            row = 0
            for rows in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[chosen]):
                for value in rows.column(0).to_pylist():
                    yield text_of(value, f"{path}, row {row}")
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({first_line(error)}).") from error


def _holds_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner))


PLAIN: Final = ("", ".txt", ".text", ".md", ".rst", ".tex", ".log", ".tokens", ".raw")
"""The suffixes of files with one document per line."""

_TABLES: Final[Mapping[str, Callable[[Readable, Unpack, str | None], Iterator[str]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _separated(",;\t|"),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}


def _listed(names: Iterable[str], most: int = 8) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most] + ["..."] * (len(shown) > most)) or "none"


def text_of(value: Any, where: str) -> str:
    """A value that is a text; raises `InputError` for any other."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise InputError(f"{where}: a document must be a string; got {kind}.")
    return value
