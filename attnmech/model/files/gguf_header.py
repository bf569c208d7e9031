"""Checks a GGUF file's header: its counts must fit the file's size before anything else is read.

The reader in the package gguf trusts the counts: it would step through an array of 10⁸ numbers one by one, even if the
file ends before them.
"""

import mmap
import struct
from pathlib import Path
from typing import Final

_SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes per value of each of GGUF's number types."""
_STRING: Final = 8
_ARRAY: Final = 9
_LEAST_TENSOR: Final = 24
"""The minimum number of bytes that describe a tensor: lengths of its name and shape, its type and its offset."""

_MOST_VALUES: Final = 2**24
"""The arrays of a header may hold this many values: the largest vocabularies have some hundred thousand tokens and
merges."""


def check_header(path: Path) -> None:
    """Raises `ValueError` if a header announces more than the file can hold, or far more than any model needs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        if data[:4] != b"GGUF":  # the reader's own error says so
            return
        # Versions are small, so the low two bytes are 0 only if the file has the opposite byte order.
        order = ">" if data[4:6] == b"\0\0" else "<"
        header.word, header.long = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")
        header.place = 8
        tensors, entries = header.count(), header.count()
        header.require(tensors * _LEAST_TENSOR, f"{tensors:,} tensors")
        for _ in range(entries):
            header.skip(header.count(), "a name")
            header.skip_value(header.kind())


class _Header:
    """Reads a header, value by value."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0
        self.values = 0
        self.word, self.long = struct.Struct("<I"), struct.Struct("<Q")

    def require(self, length: int, what: str) -> None:
        """Raises `ValueError` if fewer than `length` bytes are left."""
        left = len(self.data) - self.place
        if length > left:
            raise ValueError(f"its header says that {what} follow, {length:,} bytes; the file has only {left:,}")

    def skip(self, length: int, what: str) -> None:
        self.require(length, what)
        self.place += length

    def kind(self) -> int:
        """Reads the number of a type."""
        start = self.place
        self.skip(self.word.size, "a type")
        return int(self.word.unpack_from(self.data, start)[0])

    def count(self) -> int:
        """Reads a length or a count."""
        start = self.place
        self.skip(self.long.size, "a count")
        return int(self.long.unpack_from(self.data, start)[0])

    def skip_value(self, kind: int) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind], "a number")
        elif kind == _STRING:
            self.skip(self.count(), "a text")
        elif kind == _ARRAY:
            inner, count = self.kind(), self.count()
            self.values += count
            self.require(count * _SCALARS.get(inner, self.long.size), f"{count:,} values")
            if self.values > _MOST_VALUES:
                raise ValueError(f"its header has arrays of {self.values:,} values; at most {_MOST_VALUES:,} are read")
            if inner in _SCALARS:
                self.skip(count * _SCALARS[inner], f"{count:,} values")
            else:
                for _ in range(count):
                    self.skip_value(inner)
        else:
            raise ValueError(f"its header has a value of type {kind}, which does not exist in GGUF")
