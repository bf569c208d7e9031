"""Reads and writes attnmech's files: tensors in safetensors format, everything else as JSON in the header; never
pickle.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..basics.files import path_of, writing
from ..errors import OutputError

_HEADER: Final = "attnmech"


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
    """Writes the file whole or not at all; returns its path."""
    target = path_of(path, OutputError)
    # Copies: safetensors refuses tensors that share memory.
    apart = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with writing(target) as draft:
        save_file(apart, draft, metadata={_HEADER: json.dumps(header)})
    return target


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header; raises an exception of any kind if attnmech did not write the file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict
        return tensors, json.loads((file.metadata() or {})[_HEADER])
