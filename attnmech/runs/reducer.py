"""A statistic of attention that is computed while the model runs.

A reducer keeps a few tensors (its state) and adds to them from each block of rows. The states of two parts of a corpus
can be merged, so the same code serves one text, a corpus and many workers; memory grows with the length of a text, not
with its square.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from ..batch import Batch
from ..maths.blocks import block_bytes
from ..model.attention.observed import LayerEnd, RowBlock
from ..model.run.hooked import HookedModel
from ..model.stack.stack import Stack
from ..results.provenance import Provenance

State: TypeAlias = dict[str, Tensor]  # the sums of a reducer so far: tensors by name


@dataclass(frozen=True)
class Run:
    """The information for a reducer before a batch runs."""

    model: HookedModel
    stack: Stack
    layers: tuple[int, ...]
    """The layers that the reducer sees, in order; `block.index` is a layer's index among them."""
    batch: Batch
    documents: Int[Tensor, " batch"]
    """The number of each text in its corpus."""
    corpus: bool
    """Whether more batches may follow; for a single batch, a reducer may keep every row."""
    between: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Values that reducers keep from one block of rows of this batch to the next, each under a separate key."""

    @property
    def n_layers(self) -> int:
        """The number of layers that the reducer sees."""
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        """The number of heads per layer."""
        return self.stack.n_heads


@dataclass(frozen=True)
class Source:
    """The information for a result after the last batch."""

    model: HookedModel
    stack: Stack
    layers: tuple[int, ...]
    documents: int
    """The number of texts."""
    truncated: int
    """The number of texts that were cut to the model's length (`truncate` in `stream`)."""
    batch: Batch | None
    """The texts; None for a corpus, whose texts are not kept."""
    provenance: Provenance


class Reducer(ABC):
    """A statistic of attention that is computed while the model runs; subclass it for your own.

    The largest score of each head:

    >>> class LargestScore(am.Reducer):                                             # doctest: +SKIP
    ...     def start(self, run):
    ...         shape = run.n_layers, run.n_heads
    ...         return {"largest": torch.full(shape, -torch.inf, device=run.model.device)}
    ...
    ...     def add(self, state, block, run):
    ...         counts = block.visible & block.real[:, None, :, None]
    ...         largest = block.scores.masked_fill(~counts, -torch.inf).amax(dim=(0, 2, 3))
    ...         state["largest"][block.index] = torch.maximum(state["largest"][block.index], largest)
    ...
    ...     def merge(self, one, other):
    ...         return {"largest": torch.maximum(one["largest"], other["largest"])}
    >>> am.stream(model, "Anna sang of shells.", [LargestScore()])[0]["largest"]       # doctest: +SKIP

    For every batch, `start` makes the tensors of a state, on the model's device. `add` receives the blocks of rows of
    each layer in turn; it changes the tensors in place, keeping shapes and dtypes, and must not keep views of a block's
    tensors. `add_layer` does the same with the points of each finished layer. A reducer defines one of the two, or
    both. `close` may replace the state of a batch by another one, such as sums. The state is then moved to the CPU.
    `merge` joins the states of two batches, or of two shards, in any order; the tensors must keep their names, dtypes
    and numbers of axes. `finish` turns the final state into the result (by default, the state is the result).

    `add` must leave padding out: `block.real` is True at rows of real tokens, and `block.visible` at the keys that a
    row can see; hidden keys have the lowest finite score, and weight 0. `run.batch` holds the tokens, `run.documents`
    the number of each text in its corpus, and `block.rows` the positions of the rows in the text. A state with NaN is
    refused; infinite numbers are allowed.

    States hold numbers, so store a token as its id: `source.model.encode(ids).tokens` gives the texts in `finish`, as
    in `examples/reducers.py`.
    """

    points: tuple[str, ...] = ()
    """Activation points of the layers to pass to the reducer: `block["resid_pre"]`, `end["z"]`.

    Points that other reducers of the same call need may be present too; `block` has only the points before attention.
    """
    optional_points: tuple[str, ...] = ()
    """Points to pass if the model has them (`"resid_mid" in end`)."""

    @abstractmethod
    def start(self, run: Run) -> State:
        """An empty state for one batch."""

    def add(self, state: State, block: RowBlock, run: Run) -> None:  # noqa: B027 - a reducer may have only the other
        """Adds a block of rows of one layer."""

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:  # noqa: B027
        """Adds the points of one finished layer."""

    def close(self, state: State, run: Run) -> State:
        """The final state of a batch, before it is merged with others; by default, the state unchanged."""
        return state

    @abstractmethod
    def merge(self, one: State, other: State) -> State:
        """The joint state of two parts."""

    def finish(self, state: State, source: Source) -> Any:
        """The result."""
        return state

    @property
    def name(self) -> str:
        """The reducer's name in messages."""
        return type(self).__name__

    @property
    def options(self) -> dict[str, str]:
        """The options that distinguish it from other reducers of its class, for provenance and journal; by default, its
        attributes.

        A run resumes from a journal only if these texts are equal, so they must not contain memory addresses. The code
        of the class must be the same too and, unless the class defines `options`, all attributes (tensors by content).
        """
        return {name: repr(value) for name, value in vars(self).items()}


Kind = TypeVar("Kind", bound=Hashable)
Value = TypeVar("Value")


class HeldLayers(Generic[Kind, Value]):
    """The layers of one batch that a reducer has still to add, by kind: only layers of one kind are added together."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind, dict[int, Value]] = {}

    @classmethod
    def of(cls, state: State, run: Run) -> "HeldLayers[Kind, Value]":
        held: HeldLayers[Kind, Value] = run.between.setdefault((id(state["classes"]), cls), cls())
        return held

    def add(self, kind: Kind, layer: int, value: Value, size: int, device: torch.device) -> dict[int, Value]:
        """Holds a layer, whose numbers take `size` bytes; returns the layers of its kind once they fill a block."""
        layers = self._by_kind.setdefault(kind, {})
        layers[layer] = value
        return self._by_kind.pop(kind) if (len(layers) + 1) * size > block_bytes(device) else {}

    def rest(self) -> Iterator[tuple[Kind, dict[int, Value]]]:
        while self._by_kind:
            yield self._by_kind.popitem()
