"""What do results have in common whose numbers follow from sums over a corpus? They are checked, and merged."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Self

from torch import Tensor

from ..basics.arguments import shown
from ..basics.fields import check_entries, check_layers
from ..errors import InputError
from ..results.provenance import Provenance
from ..results.result import PagedResult
from .layers import count_layers
from .reducer import Reducer, Source, State


def over_shards(parts: Sequence[Any], merge: Callable[[State, State], State]) -> dict[str, Any]:
    """What a result over several shards has instead of one of its parts: texts, state and provenance."""
    provenance = Provenance.of_shards([each.provenance for each in parts])
    return {
        "documents": sum(each.documents for each in parts),
        "truncated": sum(each.truncated for each in parts),
        "state": reduce(merge, [dict(each.state) for each in parts]),
        "provenance": provenance,
    }


@dataclass(frozen=True, repr=False)
class Summed(PagedResult):
    """A result whose numbers follow from the state of a reducer."""

    STATE: ClassVar[Mapping[str, Any]]
    """The types of the entries of `state`."""

    layers: tuple[int, ...]
    """The layers measured."""
    n_layers: int
    """The model's number of layers: the length of the axes `layer`, which are NaN at layers not measured."""
    documents: int
    """How many texts there were."""
    truncated: int
    """How many of them were cut to the model's length."""
    state: Mapping[str, Tensor]
    """The sums from which everything is computed."""
    provenance: Provenance

    @classmethod
    def of(cls, state: State, source: Source, **more: Any) -> Self:
        """The result for a state."""
        return cls(
            layers=source.layers,
            n_layers=count_layers(source.model, source.stack),
            documents=source.documents,
            truncated=source.truncated,
            state=state,
            provenance=source.provenance,
            **more,
        )

    @property
    @abstractmethod
    def _reducer(self) -> Reducer:
        """One whose `merge` joins two states."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that are known from elsewhere."""
        return {"layer": len(self.layers)}

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, self.n_layers)
        for name in self.STATE:
            self.state[name]
        check_entries("state", self.state, self.STATE, self.axis_lengths)

    def merged(self, *others: Self) -> Self:
        """The result over several shards of a corpus, as if they had been one run.

        Raises `InputError` for shards that share documents or come from two corpora, and for results with another
        model, other layers, options or hooks.
        """
        parts = (self, *others)
        for each in parts:
            if type(each) is not type(self) or each._kind != self._kind:
                raise InputError(
                    f"a {type(self).__name__} is merged only with others of the same model, layers, options and hooks; "
                    f"got {shown(each)}."
                )
        return replace(self, **over_shards(parts, self._reducer.merge))

    @property
    def _kind(self) -> tuple[object, ...]:
        """What two results must share to be merged."""
        origin = self.provenance
        options = {name: str(value) for name, value in origin.options.items() if name not in ("shard", "corpus")}
        return self.layers, origin.weights, origin.edits, tuple(sorted(options.items()))
