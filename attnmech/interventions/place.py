"""Where an edit acts: in which stack and layers of a model, which texts of a batch, and which rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..batch import Batch
from ..errors import InputError


@dataclass(frozen=True)
class Place:
    """The part of a model that an edit acts on."""

    stack: str
    layers: tuple[int, ...]
    sizes: Mapping[str, int]
    """The sizes of the point's axes, by name."""
    no_special_keys: str
    """Why no key is a special token; empty where some may be."""


@dataclass(frozen=True)
class BatchPart:
    """The texts of a running batch that an intervention changes."""

    texts: slice = field(default_factory=lambda: slice(None))
    """Their places in the running batch."""
    source: slice | Tensor = field(default_factory=lambda: slice(None))
    """Their places among the texts that the intervention's own tensors were made for."""

    def of(self, value: Tensor, texts: int) -> Tensor:
        """The values of this block in an intervention's tensor, which has one entry per text, or one for all texts."""
        chosen = value if len(value) == 1 else value[self.source]
        if len(chosen) not in (1, texts):
            raise InputError(f"it is made for {len(value)} texts, but {texts} run; give values for each or for one.")
        return chosen


@dataclass(frozen=True)
class Block:
    """A block of rows of a layer's attention, in the texts that an intervention changes."""

    layer: int
    part: BatchPart
    queries: Batch
    keys: Batch
    rows: slice
    key_count: int
    """The number of keys passed to the block."""
