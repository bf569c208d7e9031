"""Files with the sums of an engine, which `am.engine_statistics` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..results.tensor_file import write_tensors

KIND: Final = "EngineSums"  # the kind of file

_HEADS: Final = {
    "sums": 3, "received": 2, "sinks": 1, "sink_rate": 1, "mass": 1, "top": 1, "distance": 1, "top_distance": 1,
    "row": 1,
}  # fmt: skip
"""The axis of heads of each tensor, by the first word of its name; others do not depend on the head."""


def to_bytes(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Sums as they pass between processes."""
    content: bytes = save(dict(tensors), metadata={"attnmech": json.dumps(header)})
    return content


def from_bytes(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The reverse of `to_bytes`."""
    size = int.from_bytes(content[:8], "little")
    return load(content), json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["attnmech"])


def joined_ranks(files: Sequence[bytes]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The sums of all workers of a tensor parallel engine, which have some heads of every layer each."""
    parts = sorted(map(from_bytes, files), key=lambda part: int(part[1]["rank"]))
    tensors, header = parts[0]
    joined = {
        name: value
        if (axis := _HEADS.get(name.split()[0])) is None
        else torch.cat([part[name] for part, _ in parts], axis)
        for name, value in tensors.items()
    }
    proofs = [part["options"]["proof"] for _, part in parts]
    worst = [max(of_layer) for of_layer in zip(*(proof["largest error by layer"] for proof in proofs), strict=True)]
    proof = proofs[0] | {"largest error by layer": worst}
    return joined, header | {"options": header["options"] | {"proof": proof}}


def write(path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
    """Writes the sums to one file, whole or not at all."""
    return write_tensors(path, tensors, {"kind": KIND, **header})
