"""Means over the rows of some texts, layer by layer and head by head, with intervals over the texts.

What a method measures of each row it adds up by text and by the class of the row; `close` counts the texts anew
in every bootstrap replicate, so that of a corpus nothing is kept that grows with it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..activations import Batch
from ..errors import InputError, MissingPointError
from ..maths.bootstrap import interval, poisson_weights
from ..results import PagedResult, Provenance
from .stream import Run, Source, State

if TYPE_CHECKING:
    from ..draw.figure_page import Section

REPLICATES: Final = 200
"""Bootstrap replicates behind every interval."""

ROW_CLASSES: Final = ("ordinary", "special", "first")
"""What may stand at a row: the first token of a text, another special token, or anything else."""


def begins(batch: Batch) -> Int[Tensor, " batch"]:
    """Where the first real token of each text stands."""
    return batch.mask.int().argmax(dim=1)


def row_classes(batch: Batch) -> Bool[Tensor, "batch class position"]:
    """Which of `ROW_CLASSES` each real token is of; padding is of none."""
    first = torch.arange(batch.ids.shape[1], device=batch.ids.device) == begins(batch)[:, None]
    known = torch.isin(batch.ids, torch.tensor(sorted(batch.special), device=batch.ids.device, dtype=batch.ids.dtype))
    return torch.stack([~known & ~first, known & ~first, first], dim=1) & batch.mask[:, None]


def text_weights(run: Run, replicates: int, seed: int) -> Float[Tensor, "batch replicate"]:
    """How often each text counts: once in column 0, and in the others as the bootstrap has it."""
    once = torch.ones(len(run.documents), 1, dtype=torch.float64)
    if not run.corpus and len(run.documents) == 1:
        return once.to(run.model.device)
    return torch.cat((once, poisson_weights(run.documents, replicates, seed)), dim=1).to(run.model.device)


def sums_by_text(
    values: Float[Tensor, "statistic *layers head batch query"],
    valid: Bool[Tensor, "statistic *layers _ batch query"],
    classes: Bool[Tensor, "batch class query"],
) -> tuple[Float[Tensor, "statistic class *layers head batch"], Float[Tensor, "statistic class *layers _ batch"]]:
    """Sums of each text's rows in each class on which a statistic is defined, and how many there are."""
    sums, counts = [], []
    for members in classes.unbind(dim=1):
        counted = valid & members
        sums.append(values.masked_fill(~counted, 0.0).double().sum(dim=-1))
        counts.append(counted.sum(dim=-1).double())
    return torch.stack(sums, dim=1), torch.stack(counts, dim=1)


def added(one: State, other: State) -> State:
    """The sums of both; what runs along positions reaches as far as the longer."""
    return {name: _sum(one[name], other[name]) for name in one}


def _sum(one: Tensor, other: Tensor) -> Tensor:
    longest = max(one.shape[-1], other.shape[-1])
    one, other = (torch.nn.functional.pad(each, (0, longest - each.shape[-1])) for each in (one, other))
    return one + other


@dataclass(frozen=True, repr=False)
class RowMeans(PagedResult):
    """What was measured of the rows of some texts: its means, their intervals, and of a single run every row.

    `state` holds "sums" `[statistic class layer head replicate]` and "counts" `[statistic class layer #head replicate]`
    and, of texts that were run together, "values" `[statistic layer head batch query]`, "valid" `[statistic layer
    #head batch query]` and "classes" `[batch class query]`.
    """

    STATISTICS: ClassVar[tuple[str, ...]]
    """What is measured, in the order of the axis `statistic`."""

    layers: tuple[int, ...]
    """The layers measured, in the order of the axis `layer`."""
    documents: int
    """How many texts there were."""
    truncated: int
    """How many of them were cut to the model's length."""
    state: Mapping[str, Tensor]
    """The sums that everything is made of."""
    chosen: tuple[str, ...]
    """The classes of rows that count (`ROW_CLASSES`)."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens that look, of texts that were run together."""
    provenance: Provenance

    @classmethod
    def of(cls, state: State, source: Source, **more: Any) -> Self:
        """The result of a state: the first row of each text is left out."""
        batch = source.batch
        return cls(
            layers=source.layers,
            documents=source.documents,
            truncated=source.truncated,
            state=state,
            chosen=("ordinary", "special"),
            tokens=() if batch is None else batch.queries(source.stack.label).tokens,
            provenance=source.provenance,
            **more,
        )

    def merged(self, *others: Self) -> Self:
        """The result over the texts of several runs on parts of one corpus, as if they had been run together.

        >>> parts = [am.attention_focus(model, am.Corpus(path), shard=(k, 4)) for k in range(4)]    # doctest: +SKIP
        >>> parts[0].merged(*parts[1:])                                                             # doctest: +SKIP
        """
        parts = (self, *others)
        for each in parts:
            if "values" in each.state:
                raise InputError("results of texts that were run together keep their rows; merge results of a corpus.")
            if (each.provenance.weights, each.provenance.edits, each._kind) != (
                self.provenance.weights,
                self.provenance.edits,
                self._kind,
            ):
                raise InputError(
                    f"results can be merged of one model, with the same layers, options and hooks; got {self!r} and "
                    f"{each!r}."
                )
        state = self.state
        for each in others:
            state = added(dict(state), dict(each.state))
        hashes = "".join(sorted(each.provenance.inputs for each in parts))
        options = {**self.provenance.options, "shard": [each.provenance.options.get("shard") for each in parts]}
        return replace(
            self,
            documents=sum(each.documents for each in parts),
            truncated=sum(each.truncated for each in parts),
            state=state,
            provenance=replace(self.provenance, inputs=hashlib.sha256(hashes.encode()).hexdigest(), options=options),
        )

    @property
    def _kind(self) -> tuple[Any, ...]:
        """What two results must share to be merged."""
        options = {name: value for name, value in self.provenance.options.items() if name != "shard"}
        return type(self), self.layers, self.chosen, json.dumps(options, sort_keys=True, default=str)

    def mean(self, statistic: str) -> Float[Tensor, "layer head"]:
        """The mean of a statistic over the rows that count and on which it is defined; NaN where there is none."""
        return self._ratios(statistic)[..., 0]

    def interval(
        self, statistic: str, level: float = 0.95
    ) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]] | None:
        """Low and high end of the bootstrap interval over texts; None where there is one text only."""
        ratios = self._ratios(statistic)
        if self.documents < 2 or ratios.shape[-1] == 1:
            return None
        return interval(ratios[..., 1:], level)

    def by_row(self, statistic: str) -> Float[Tensor, "layer head batch query"]:
        """A statistic on each row; NaN where it is not defined."""
        place = self._place(statistic)
        return self._row("values")[place].masked_fill(~self._row("valid")[place], torch.nan)

    def where(
        self, *, first_row: bool = False, special: bool = True, rows: Bool[Tensor, "batch query"] | None = None
    ) -> Self:
        """The same over other rows: with the first row of each text, or without those of special tokens.

        `rows` is True at the rows to be counted, of texts that were run together (of a corpus rows are not kept); then
        only what is known of each row can be had, without intervals.
        """
        chosen = ("ordinary", *(["special"] if special else []), *(["first"] if first_row else []))
        if rows is None:
            return replace(self, chosen=chosen)
        classes = self._row("classes")
        if rows.dtype != torch.bool or rows.shape != classes[:, 0].shape:
            raise InputError(
                f"`rows` must be True or False for each of the {list(classes[:, 0].shape)} rows; got {rows.dtype} "
                f"{list(rows.shape)}."
            )
        kept = {name: value for name, value in self.state.items() if name in self.BY_ROW}
        members = classes & rows.cpu()[:, None]
        sums, counts = (each.sum(dim=-1, keepdim=True) for each in sums_by_text(kept["values"], kept["valid"], members))
        return replace(self, chosen=chosen, state=kept | {"sums": sums, "counts": counts})

    BY_ROW: ClassVar[tuple[str, ...]] = ("values", "valid", "classes")
    """The entries of the state that are kept row by row."""

    def _ratios(self, statistic: str) -> Float[Tensor, "layer head replicate"]:
        place = self._place(statistic)
        chosen = [ROW_CLASSES.index(name) for name in self.chosen]
        sums, counts = (self.state[name][place][chosen].sum(dim=0) for name in ("sums", "counts"))
        return sums / counts

    def _place(self, statistic: str) -> int:
        if statistic not in self.STATISTICS:
            raise InputError(f"`statistic` must be one of {', '.join(self.STATISTICS)}; got {statistic!r}.")
        return self.STATISTICS.index(statistic)

    def _row(self, name: str) -> Tensor:
        return self._kept(name, "rows are kept of texts that are run together (a string or a list), not of a corpus")

    def _sums(self, name: str) -> Tensor:
        """An entry `[class ...]` summed over the classes that count."""
        whole = self._kept(name, "of rows that were chosen one by one, only what is known of each is added up")
        return whole[[ROW_CLASSES.index(each) for each in self.chosen]].sum(dim=0)

    def _kept(self, name: str, why: str) -> Tensor:
        if name not in self.state:
            raise MissingPointError(f"this result does not hold that: {why}.")
        return self.state[name]

    def to_frame(self) -> pd.DataFrame:
        """A row a head: layer, head, every statistic, and its `_low` and `_high` where there is an interval."""
        columns: dict[str, Tensor] = {}
        for name in self.STATISTICS:
            columns[name] = self.mean(name)
            ends = self.interval(name)
            if ends is not None:
                columns[f"{name}_low"], columns[f"{name}_high"] = ends
        layers, heads = columns[self.STATISTICS[0]].shape
        return pd.DataFrame(
            {
                "layer": [layer for layer in self.layers for _ in range(heads)],
                "head": [head for _ in range(layers) for head in range(heads)],
                **{name: value.flatten().tolist() for name, value in columns.items()},
            }
        )

    def _sections(self) -> "Sequence[Section]":
        return ()

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {self.provenance.model}"

    @property
    def _origin(self) -> dict[str, str]:
        return {**super()._origin, "texts": f"{self._texts}, {self.truncated} of them cut to the model's length"}

    @property
    def lead(self) -> str:
        """One sentence that the numbers support."""
        return f"Means over the rows of {self._texts}."

    @property
    def _texts(self) -> str:
        return "1 text" if self.documents == 1 else f"{self.documents} texts"

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.state)

    def _facts(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "documents": self.documents,
            "truncated": self.truncated,
            "chosen": list(self.chosen),
            "tokens": [list(row) for row in self.tokens],
        }

    @classmethod
    def _from_saved(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], provenance: Provenance) -> Self:
        own = {name: value for name, value in facts.items() if name not in ("layers", "chosen", "tokens")}
        return cls(
            layers=tuple(facts["layers"]),
            chosen=tuple(facts["chosen"]),
            tokens=tuple(tuple(row) for row in facts["tokens"]),
            state=dict(tensors),
            provenance=provenance,
            **own,
        )
