"""What every result shares: a frame, a file, a page, and where it came from."""

import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .draw.text import html_text
from .errors import InputError
from .files import writing

if TYPE_CHECKING:
    from .draw.figure_page import Section

_PACKAGES = ("attnmech", "torch", "transformers", "transformer-lens")


@dataclass(frozen=True)
class Provenance:
    """What a result was computed from: enough to know whether two results may be compared."""

    model: str
    weights: str
    """SHA-256 of the model's config and parameters."""
    inputs: str
    """SHA-256 of everything that the model was given."""
    edits: tuple[str, ...]
    """The points at which hooks were in force, "pattern 3"; such results are not the model's own."""
    tokens: tuple[tuple[str, ...], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "model": self.model,
            "weights": self.weights,
            "inputs": self.inputs,
            "edits": list(self.edits),
            "tokens": [list(row) for row in self.tokens],
            "options": dict(self.options),
            "versions": dict(self.versions),
        }

    @property
    def entries(self) -> dict[str, str]:
        """What a page says of it, name by name."""
        return {
            "model": self.model,
            "config and weights (SHA-256)": self.weights,
            "inputs (SHA-256)": self.inputs,
            "hooks in force": ", ".join(self.edits) or "none",
            **{name: str(value) for name, value in self.options.items()},
            **self.versions,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_dict`."""
        tokens = tuple(tuple(row) for row in values["tokens"])
        edits = tuple(values["edits"])
        return cls(
            values["model"],
            values["weights"],
            values["inputs"],
            edits,
            tokens,
            values["options"],
            values["versions"],
        )


class Result(ABC):
    """Base of all results. A subclass gives `to_frame`, and its tensors and facts for `save`."""

    provenance: Provenance

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The numbers as a tidy table, a row a head."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """Everything numeric that `load` needs."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Everything else that `load` needs, as JSON values."""

    @classmethod
    @abstractmethod
    def _from_saved(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], provenance: Provenance) -> Self:
        """The reverse of `_tensors` and `_facts`."""

    def save(self, path: str | Path) -> Path:
        """Writes the result to one safetensors file (tensors, and JSON in its header); never pickle."""
        tensors, same_as = _without_repeats(self._tensors())
        header = {
            "kind": type(self).__name__,
            "facts": self._facts(),
            "provenance": self.provenance.to_dict(),
            "same_as": same_as,
        }
        target = Path(path)
        with writing(target) as draft:
            save_file(tensors, draft, metadata={"attnmech": json.dumps(header)})
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a result that `save` wrote; needs no model."""
        source = Path(path)
        if not source.is_file():
            raise InputError(f"there is no file {source}.")
        try:
            with safe_open(source, framework="pt") as file:
                header = json.loads((file.metadata() or {})["attnmech"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict
        except Exception as error:
            raise InputError(f"{source} is not a result that attnmech saved ({error}).") from error
        if header["kind"] != cls.__name__:
            raise InputError(f"{source} holds a {header['kind']}; load it with {header['kind']}.load.")
        tensors |= {name: tensors[first] for name, first in header["same_as"].items()}
        return cls._from_saved(tensors, header["facts"], Provenance.from_dict(header["provenance"]))

    def _repr_html_(self) -> str:
        from .draw.figure_page import table_html

        return f"<p>{html_text(repr(self))}</p>{table_html(self.to_frame())}"


class PagedResult(Result):
    """A result with a page of its own: figures, a table, and one sentence that the numbers support."""

    @property
    @abstractmethod
    def lead(self) -> str:
        """The one sentence that the numbers support."""

    @property
    @abstractmethod
    def _title(self) -> str:
        """The heading of the page."""

    @abstractmethod
    def _sections(self) -> "Sequence[Section]":
        """The figures of the page."""

    @property
    def _origin(self) -> dict[str, str]:
        """What the numbers came from, as the page says it."""
        return self.provenance.entries

    def to_html(self, path: str | Path) -> Path:
        """Writes the figures and the table as one page that opens without a network."""
        from .draw.figure_page import render_figures

        target = Path(path)
        html = render_figures(
            title=self._title,
            lead=self.lead,
            sections=self._sections(),
            frame=self.to_frame(),
            provenance=self._origin,
        )
        with writing(target) as draft:
            draft.write_text(html, encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        from .draw.figure_page import in_notebook_output

        return in_notebook_output(title=self._title, lead=self.lead, sections=self._sections(), frame=self.to_frame())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lead})"


def _without_repeats(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors ready to be written, each once; and, for those that are the same memory, as which they stand."""
    once: dict[str, Tensor] = {}
    same_as: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, value in tensors.items():
        key = (value.data_ptr(), tuple(value.shape), value.stride())
        if value.numel() and key in first:
            same_as[name] = first[key]
            continue
        first[key] = name
        once[name] = value.detach().cpu().contiguous()
    return once, same_as
