"""Reads and writes attnmech's files: tensors in safetensors format, everything else as JSON in the header; never
pickle.

The header also holds a digest: the XXH3 (128 bits) of the whole file, with zeros in the place of the digest.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..basics.files import path_of, writing
from ..basics.messages import first_line
from ..errors import InputError, OutputError

_HEADER: Final = "attnmech"
_DIGEST: Final = "xxh3_128"
_NONE: Final = "0" * 32  # the digest while the file is hashed
_PLACE: Final = re.compile(rf'"{_DIGEST}":"(.{{{len(_NONE)}}})"'.encode(), re.DOTALL)
_AT_ONCE: Final = 2**20  # this many bytes of a file are hashed at a time


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, sync: bool = False
) -> Path:
    """Writes the file whole or not at all; returns its path. With `sync`, the file survives a loss of power."""
    target = path_of(path, OutputError)
    # Copies: safetensors refuses tensors that share memory.
    apart = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with writing(target) as draft:
        save_file(apart, draft, metadata={_HEADER: json.dumps(header), _DIGEST: _NONE})
        with draft.open("r+b") as file:
            digest, place, _ = _digest_of(file)
            file.seek(place)
            file.write(digest.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
    return target


def check_whole(path: Path) -> None:
    """Raises `InputError` if the file of `write_tensors` has changed since; files of older versions have no digest."""
    try:
        with path.open("rb") as file:
            digest, _, held = _digest_of(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {first_line(error)}.") from error
    if digest != held:
        raise InputError(f"{path} is damaged: its content does not match its digest. Copy it again, or save it again.")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header; raises an exception of any kind if attnmech did not write the file.

    The caller has called `check_whole`.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if unknown := metadata.keys() - {_HEADER, _DIGEST, "format"}:  # such as a damaged name of the digest
            raise ValueError(f"its header has an unknown entry {min(unknown)!r}")
        if _HEADER not in metadata:
            raise ValueError(f"its header has no entry {_HEADER!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict
        return tensors, json.loads(metadata[_HEADER])


def _digest_of(file: BinaryIO) -> tuple[str, int, str]:
    """The digest of a file's content, and its place and value in the header; ("", 0, "") without one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    head = start + file.read(length if length <= size else 0)
    match = _PLACE.search(head)
    if match is None:
        return "", 0, ""
    place, end = match.span(1)
    content = xxhash.xxh3_128(head[:place] + _NONE.encode() + head[end:])
    while block := file.read(_AT_ONCE):
        content.update(block)
    return content.hexdigest(), place, head[place:end].decode("latin-1")
