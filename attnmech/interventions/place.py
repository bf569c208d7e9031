"""Describes where an edit acts: the stack and layers of a model, the texts of a batch, and the rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..batch import Batch
from ..errors import InputError


@dataclass(frozen=True)
class Place:
    """The part of a model on which an edit acts."""

    stack: str
    layers: tuple[int, ...]
    sizes: Mapping[str, int]
    """The sizes of the point's axes, by name."""
    no_special_keys: str
    """Why no key can be a special token; empty if some can."""


@dataclass(frozen=True)
class BatchPart:
    """The texts of a running batch that an intervention changes."""

    texts: slice = field(default_factory=lambda: slice(None))
    """The indices of these texts in the running batch."""
    source: slice | Tensor = field(default_factory=lambda: slice(None))
    """The indices of these texts among those for which the intervention's tensors were made."""

    def of(self, value: Tensor, texts: int) -> Tensor:
        """The values of this block in an intervention's tensor, which has one entry per text, or one for all texts."""
        chosen = value if len(value) == 1 else value[self.source]
        if len(chosen) not in (1, texts):
            raise InputError(
                f"its values are for {len(value)} texts, but the run has {texts}; give values for each text, or for a "
                f"single one."
            )
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
