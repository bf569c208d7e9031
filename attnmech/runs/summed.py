"""Defines results whose numbers follow from sums over a corpus: checks them, and merges them over shards."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Self

from torch import Tensor

from ..basics.arguments import shown
from ..basics.fields import check_entries
from ..basics.nouns import counted
from ..errors import InputError
from ..maths.groups import distinct_texts
from ..maths.intervals import TextMeans
from ..results.by_layer import OfLayers
from ..results.provenance import Provenance
from ..results.sentences import interval_note
from ..results.table import Table, WithQuantities
from .reducer import Source, State


@dataclass(frozen=True, repr=False)
class Summed(OfLayers):
    """A result whose numbers follow from the state of a reducer."""

    _AXES: ClassVar = {"layer": "layers"}
    _STATE: ClassVar[Mapping[str, Any]]  # the types of the entries of `state`
    _ROWS: ClassVar[str] = "values"  # the entry of `state` that keeps rows, for texts that were run together
    _STRINGS: ClassVar[tuple[str, ...]] = ()  # the fields that map tokens to strings

    layers: tuple[int, ...]
    """The layers measured."""
    n_layers: int
    """The model's number of layers: the length of the axes `layer`, which are NaN at layers not measured."""
    documents: int
    """The number of texts."""
    truncated: int
    """The number of texts cut to the model's length."""
    state: Mapping[str, Tensor]
    """The sums from which everything is computed."""
    provenance: Provenance

    @classmethod
    def of(cls, state: State, source: Source, **more: Any) -> Self:
        return cls(
            layers=source.layers,
            n_layers=len(source.stack.places),
            documents=source.documents,
            truncated=source.truncated,
            state=state,
            provenance=source.provenance,
            **more,
        )

    @property
    def _texts(self) -> str:
        return counted(self.documents, distinct_texts(self.state, self.documents))

    @abstractmethod
    def _merge(self, one: State, other: State) -> State:
        """The joint state of two shards, as the reducer's `merge` makes it."""

    @property
    def _required(self) -> Sequence[str]:
        """The entries that every state has."""
        return tuple(self._STATE)

    def _check(self) -> None:
        super()._check()
        for name in self._required:
            self.state[name]
        check_entries("state", self.state, self._STATE, self._axis_lengths)

    def merged(self, *others: Self) -> Self:
        """Merges the results of several shards of a corpus, as if one run had made them.

        Raises `InputError` for shards that share documents or come from two corpora, for results with another model,
        other layers, options or hooks, and for results that keep rows.
        """
        parts = (self, *others)
        for part in parts:
            if isinstance(part, Summed) and part._ROWS in part.state:
                raise InputError("results that keep rows cannot be merged; measure with keep_rows=False.")
            if type(part) is not type(self) or part._kind != self._kind:
                raise InputError(
                    f"a {type(self).__name__} is merged only with others of the same model, layers, options and hooks; "
                    f"got {shown(part)}."
                )
        if differing := {name for part in parts for name in part.state.keys() ^ self.state.keys()}:
            raise InputError(
                "these shards were measured by different versions of attnmech: not all of them have "
                f"{min(differing)!r}. Measure the older ones again."
            )
        provenance = Provenance.of_shards([part.provenance for part in parts])
        strings: dict[str, Any] = {
            name: reduce(or_, (dict(getattr(part, name)) for part in parts)) for name in self._STRINGS
        }
        state: State = reduce(self._merge, [dict(part.state) for part in parts])
        return replace(
            self,
            documents=sum(part.documents for part in parts),
            truncated=sum(part.truncated for part in parts),
            state=state,
            provenance=provenance,
            **strings,
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        """The facts that two results must share to be merged."""
        origin = self.provenance
        options = {name: value for name, value in origin.options.items() if name not in ("shard", "corpus")}
        return self.layers, origin.weights, origin.edits, json.dumps(options, sort_keys=True, default=str)


class OverGroups(WithQuantities, Summed):
    """A result whose numbers follow from the state of a reducer, and are means over texts or groups of texts."""

    @property
    def note(self) -> str:
        return interval_note(len(self.state["groups"]), self._n_texts - self._n_distinct, self._SAMPLE)

    @property
    def _n_texts(self) -> int:
        return self.documents

    @property
    def _n_distinct(self) -> int:
        return distinct_texts(self.state, self.documents)


class SummedTable(Table, OverGroups):
    """The same, at each of the result's places."""

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        return every  # all copies of a text are in one group
