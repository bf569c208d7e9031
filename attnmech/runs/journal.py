"""A run on disk: what it needs to go on after it was cut off, whatever cut it off."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import JournalError, first_line
from ..files import writing

ADVICE: Final = "Give another path or delete it."


@dataclass(frozen=True)
class Entry:
    """How far a run has come."""

    tensors: Mapping[str, Tensor]
    """All that it has added up, under any names."""
    batches: int
    """How many batches are in it."""
    digest: str
    """`CorpusBatch.digest` of the last of them."""
    counters: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """One file with the last entry of a run, written whole or not at all.

    `identity` says, as JSON values, what the run is: only a run of the same identity goes on from the file.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._identity = {name: _written(value) for name, value in identity.items()}

    def write(self, entry: Entry) -> None:
        """Puts an entry in the place of the last one; a run killed in here leaves the last one."""
        # Numbers stand for names, since safetensors reserves some names; copies for tensors that share memory.
        tensors = {
            str(number): value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for number, value in enumerate(entry.tensors.values())
        }
        header = {
            "kind": type(self).__name__,
            "identity": self._identity,
            "names": list(entry.tensors),
            "batches": entry.batches,
            "digest": entry.digest,
            "counters": dict(entry.counters),
        }
        with writing(self.path) as draft:
            save_file(tensors, draft, metadata={"attnmech": json.dumps(header)})
            with draft.open("rb") as file:
                os.fsync(file.fileno())

    def resume(self) -> Entry | None:
        """The last entry, or None where there is no file.

        Raises `JournalError` for the journal of another run and for a file that is none; it stays as it is.
        """
        if not self.path.exists():
            return None
        try:
            header, tensors = self._read()
            entry = Entry(
                {name: tensors[str(number)] for number, name in enumerate(header["names"])},
                header["batches"],
                header["digest"],
                header["counters"],
            )
        except Exception as error:
            raise JournalError(f"{self.path} is not a whole journal ({first_line(error)}). {ADVICE}") from error
        self._check(header["identity"])
        return entry

    def remove(self) -> None:
        """Takes the file away once the run is at its end."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        with safe_open(self.path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["attnmech"])
            # Copies, since what is read in place changes with the file.
            return header, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dict

    def _check(self, held: Mapping[str, str]) -> None:
        names = [*self._identity, *(name for name in held if name not in self._identity)]
        differences = [
            f"{name}: expected {self._identity.get(name, 'none')}, the journal holds {held.get(name, 'none')}"
            for name in names
            if self._identity.get(name) != held.get(name)
        ]
        if differences:
            raise JournalError(f"{self.path} is the journal of another run. {'; '.join(differences)}. {ADVICE}")


def _written(value: Any) -> str:
    """A value as JSON, the same text for the same value."""
    return json.dumps(value, sort_keys=True)
