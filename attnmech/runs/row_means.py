"""Computes means over the rows of some texts, for each layer and head, with intervals over the texts.

A method sums the statistics of its rows by text (or, for many texts, by groups of texts, as in `maths/groups.py`) and
by the class of the row, so memory does not grow with the corpus.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..basics.arguments import dense, flag, option, shown
from ..basics.fields import check_rows
from ..draw.section import Section
from ..errors import InputError, MissingPointError
from ..maths.groups import FIRST, by_group, distinct_texts, joined
from ..maths.intervals import TextMeans, difference
from ..maths.sums_by_text import counts_by_text, sums_by_text
from ..results.by_layer import shared_layers
from ..results.quantity import Places
from ..results.table import TextResult
from .reducer import Run, Source, State
from .states import on_cpu, summed_to_longer
from .summed import Summed
from .token_types import ROW_CLASSES

SUMMED: Final = ("sums", "counts", "block_sums", "block_counts")  # entries with texts, or groups of texts, as last axis

_UNMATCHED: Final = "the two results put these texts into different groups, so a difference has no interval"


def closed(state: State, run: Run) -> State:
    """The state on the CPU: of a corpus, with sums by group of texts instead of sums by text."""
    here = on_cpu(state)
    summed = [name for name in SUMMED if name in here]
    if not run.corpus:
        return _each_alone(here, summed)
    return by_group({**here, FIRST: run.documents.cpu()}, run.batch.digests, summed)


def _each_alone(state: State, summed: Sequence[str]) -> State:
    """A state in which every text that runs with the others is a group, so that two results can be paired by text."""
    number = torch.arange(state[summed[0]].shape[-1])
    return by_group({**state, FIRST: number}, number, summed, most=len(number))


def sum_of_states(one: State, other: State) -> State:
    """The sums of both states; axes of positions are extended to the longer of the two."""
    grouped = joined(one, other, [name for name in SUMMED if name in one])
    return {name: grouped[name] if name in grouped else summed_to_longer(one[name], other[name]) for name in one}


@dataclass(frozen=True, repr=False)
class RowMeans(TextResult, Summed):
    """Statistics of the rows of some texts: their means, intervals and, for texts run together, every row.

    `state` holds "sums" `[statistic class layer head group]` and "counts" `[statistic class layer #head group]`, where
    a group is one text, or, in a corpus of more than 256, several; and, for texts run together, "values" `[statistic
    layer head batch query]`, "valid" `[statistic layer #head batch query]` and "classes" `[batch class query]`. A
    difference has means, their intervals, and rows; its two `parts` have the rest.
    """

    _STATE: ClassVar[Mapping[str, Any]] = {
        "sums": Float[Tensor, "statistic class layer head group"],
        "counts": Float[Tensor, "statistic class layer #head group"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
        FIRST: Int[Tensor, " group"],
        "values": Float[Tensor, "statistic layer head batch row"],
        "valid": Bool[Tensor, "statistic layer #head batch row"],
        "classes": Bool[Tensor, "batch class row"],
    }
    """The types of the entries of `state`; a subclass adds its own."""

    chosen: tuple[str, ...]
    """The classes of rows over which means are taken (`ROW_CLASSES`)."""
    tokens: tuple[tuple[str, ...], ...]
    """The query tokens, for texts that were run together."""

    @classmethod
    def of(cls, state: State, source: Source, **more: Any) -> Self:
        """Makes the result from a state; its means leave out the first row of each text."""
        batch = source.batch
        tokens = () if batch is None else batch.queries(source.stack.label).tokens
        return super().of(state, source, chosen=("ordinary", "special"), tokens=tokens, **more)

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes that statistics, classes, layers and, for texts run together, tokens label."""
        rows = {"batch": len(self.tokens), "row": len(self.tokens[0])} if self.tokens else {}
        return {**super()._axis_lengths, "statistic": len(self.STATISTICS), "class": len(ROW_CLASSES), **rows}

    @property
    def _required(self) -> Sequence[str]:
        return ("sums", "counts", *(("modulus",) if "groups" in self.state else ()))

    def _check(self) -> None:
        super()._check()
        texts = len(self.state["classes"]) if "classes" in self.state else len(self.tokens)
        check_rows("tokens", self.tokens, texts, self._axis_lengths.get("row"))
        for name in self.chosen:
            option("chosen", name, ROW_CLASSES)

    def merged(self, *others: Self) -> Self:
        """Merges the results of runs on several shards of a corpus, as if one run had made them.

        >>> parts = [am.attention_focus(model, am.Corpus(path), shard=(k, 4)) for k in range(4)]    # doctest: +SKIP
        >>> parts[0].merged(*parts[1:])                                                             # doctest: +SKIP

        Raises `InputError` for shards that share documents or come from two corpora, and for results with another
        model, other layers, options or hooks.
        """
        for result in (self, *others):
            if not isinstance(result, RowMeans):
                raise InputError(f"`merged` takes {type(self).__name__} results; got {shown(result)}.")
            if result.parts is not None:
                raise InputError("differences cannot be merged; merge the results of each corpus, then subtract.")
            if "values" in result.state:
                raise InputError("results that keep rows cannot be merged; measure with keep_rows=False.")
            if result._kind != self._kind:
                raise InputError(
                    f"merged results must have the same model, layers, options and hooks; got {self!r} and {result!r}."
                )
        return super().merged(*others)

    def _merge(self, one: State, other: State) -> State:
        return sum_of_states(one, other)

    @property
    def _kind(self) -> tuple[object, ...]:
        return type(self), self.chosen, *super()._kind

    def by_row(self, statistic: str) -> Float[Tensor, "layer head batch query"]:
        """A statistic for each row; NaN where it is not defined."""
        if self.parts is not None:
            if not self.paired:
                raise MissingPointError(
                    "rows of different texts cannot be subtracted; use `by_row` of each of the two `parts`."
                )
            one, other = (part.by_row(statistic)[rows] for part, rows in self._parts_in_rows())
            return one - other
        of_rows = list(self.STATISTICS)[: self._axis_lengths["statistic"]]
        place = of_rows.index(option("statistic", statistic, of_rows))
        return self._row("values")[place].masked_fill(~self._row("valid")[place], torch.nan)

    def where(
        self, *, first_row: bool = False, special: bool = True, rows: Bool[Tensor, "batch query"] | None = None
    ) -> Self:
        """The same result over other rows: including the first row of each text, or excluding the rows of special
        tokens.

        `rows` is True at the rows to count; it needs texts that were run together, since rows of a corpus are not kept,
        and leaves only the statistics that are kept row by row.
        """
        if self.parts is not None:
            one, other = self._two
            options: dict[str, Any] = {"first_row": first_row, "special": special, "rows": rows}
            return one.where(**options) - other.where(**options)
        with_special, with_first = flag("special", special), flag("first_row", first_row)
        chosen = ("ordinary", *(["special"] if with_special else []), *(["first"] if with_first else []))
        if rows is None:
            return replace(self, chosen=chosen)
        classes = self._row("classes")
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool or rows.shape != classes[:, 0].shape:
            raise InputError(
                f"`rows` must be True or False for each of the {list(classes[:, 0].shape)} rows; got {shown(rows)}."
            )
        dense("`rows`", rows)
        kept = {name: value for name, value in self.state.items() if name in self._BY_ROW}
        members = classes & rows.cpu()[:, None]
        defined = kept["values"].masked_fill(~kept["valid"], 0.0)
        sums, counts = sums_by_text(defined, members), counts_by_text(kept["valid"], members)
        state = kept | {"sums": sums, "counts": counts}
        return replace(self, chosen=chosen, state=_each_alone(state, ("sums", "counts")))

    _BY_ROW: ClassVar[tuple[str, ...]] = ("values", "valid", "classes")
    """The entries of the state that are kept row by row."""

    def _parts_in_rows(self) -> list[tuple[Self, list[int]]]:
        """The two results of a difference, each with the indices of the difference's layers in its state."""
        return [(part, [part.layers.index(layer) for layer in self.layers]) for part in self._two]

    def _by_text(self, name: str) -> TextMeans:
        """The means over all texts that run together, copies included, or over groups of a corpus."""
        place = self.STATISTICS.place(name)
        if self.parts is not None:
            one, other = (part._by_text(name).at(rows) for part, rows in self._parts_in_rows())
            shared = self._shared_groups()
            if shared is None:
                return TextMeans.of_values((one.mean - other.mean)[..., None])
            return difference(*(of_groups(means, places) for means, places in zip((one, other), shared, strict=True)))
        chosen = [ROW_CLASSES.index(row_class) for row_class in self.chosen]
        sums, counts = (self.state[entry][place][chosen].sum(dim=0) for entry in ("sums", "counts"))
        return TextMeans.of_ratio(sums, counts)

    @property
    def _places(self) -> Places:
        return Places.of_heads(self.layers, self._measured()[0].state["sums"].shape[3], self.n_layers)

    def _shared_groups(self) -> tuple[list[int], list[int]] | None:
        """The indices, in each part of a difference, of the groups of texts that both parts have; None if groups do not
        match.

        Groups match if their first texts do. One of the parts may lack texts on which workers ended. If two tokenizers
        disagree which texts are copies, or which of more than 256 texts are in a group, groups do not match.
        """
        one, other = (part.state.get(FIRST) for part in self._two)
        if not self.paired or one is None or other is None:
            return None
        shared, *places = np.intersect1d(one.numpy(), other.numpy(), return_indices=True)
        lost = sum(len(part.provenance.options.get("left out", ())) for part in self._two)
        if not len(shared) or len(one) + len(other) - 2 * len(shared) > 2 * lost:
            return None
        return places[0].tolist(), places[1].tolist()

    def _row(self, name: str) -> Tensor:
        return self._kept(
            name,
            "rows are kept for texts that are run together (a string or a list, or keep_rows=True), not for a corpus",
        )

    def _sums(self, name: str) -> Tensor:
        whole = self._kept(name, "neither a choice of `rows` nor a serving engine measures it")
        return whole[[ROW_CLASSES.index(row_class) for row_class in self.chosen]].sum(dim=0)

    def _kept(self, name: str, why: str) -> Tensor:
        if self.parts is not None:
            raise MissingPointError(f"`{name}` is unavailable in a difference; use its two results, `parts`.")
        if name not in self.state:
            raise MissingPointError(f"`{name}` is unavailable: {why}.")
        return self.state[name]

    def _comparable(self) -> dict[str, Any]:
        options = self.provenance.options
        return {
            "number of layers": self.n_layers,
            "number of heads": self.state["sums"].shape[3],
            "stack": options.get("stack"),
            "rows": self.chosen,
        }

    def _minus(self, other: Self, paired: bool) -> Self:
        return replace(
            self,
            layers=shared_layers(self.layers, other.layers),
            documents=min(self.documents, other.documents),
            truncated=max(self.truncated, other.truncated),
            state={},
            tokens=self.tokens if self.tokens == other.tokens else (),
        )

    def _difference_sections(self, figures: Mapping[str, str]) -> "list[Section]":
        """A map for each figure; `figures` gives its statistic."""
        reading = (
            "Each cell is one head: blue where the first result is larger, brown where the second is; "
            "pale where the difference is not clear among all heads."
        )
        return [
            Section(
                f"Difference of {statistic}",
                reading,
                {f"difference-{statistic}": self._map(statistic)},
                f'difference.plot("{name}")',
            )
            for name, statistic in figures.items()
        ]

    @property
    def _unpaired(self) -> str:
        unmatched = self.parts is not None and self.paired and self._shared_groups() is None
        return _UNMATCHED if unmatched else super()._unpaired

    def _difference_lead(self, statistic: str) -> str:
        """The sentence about the head at which a statistic differs most."""
        groups = min(len(part.state["groups"]) for part in self._two if "groups" in part.state)
        largest = self._largest(statistic, what=f"difference of {statistic}", group=max(1.0, self._n_distinct / groups))
        return f"{self._opening}on {self._texts}, {largest}."

    def _sections(self) -> "Sequence[Section]":
        return ()

    @property
    def _title(self) -> str:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__)
        return f"{words.capitalize()} of {self.provenance.short_name}"

    @property
    def _origin(self) -> dict[str, str]:
        cut = f", {self.truncated} of them cut to the model's length" if self.parts is None else ""
        return {**super()._origin, "texts": f"{self._texts}{cut}"}

    @property
    def lead(self) -> str:
        return f"{self._opening}Means over the rows of {self._texts}."

    @property
    def _n_texts(self) -> int:
        return self.documents

    @property
    def _n_distinct(self) -> int:
        return min(
            result.provenance.distinct(distinct_texts(result.state, result.documents))
            if "groups" in result.state
            else result.documents
            for result in self._measured()
        )


def of_groups(means: TextMeans, places: list[int]) -> TextMeans:
    return TextMeans(means.above[..., places], means.below[..., places])
