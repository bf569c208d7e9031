"""One statistic of a result: its means over texts at every place, with their intervals and tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Self

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..basics.public import public
from ..maths.intervals import LEVEL, TextMeans, checked_level
from ..maths.statistic import Statistic
from .by_layer import by_layer

CLARITY: Final = ("agreeing", "clear", "clear_size", "one_text")  # what the texts say about a mean's sign and size


@dataclass(frozen=True, eq=False)
class Places:
    """Where the means of a result stand: heads, positions, pairs, interventions, ..."""

    columns: Mapping[str, Sequence[Any]]  # the first columns of the table, with an entry for each of its rows
    index: tuple[Any, ...]  # the indices, in tensors `[*place]`, of each row of the table
    named: Callable[[Sequence[int]], str]  # the name of a place in a sentence, from its indices among the means
    things: str = "heads"
    layers: Sequence[int] = ()  # the layers of the first axis of the means, if not all layers of the model are there
    spread: Callable[[Tensor], Tensor] = field(default=lambda measured: measured)
    """Turns numbers of the places measured into a tensor `[*place]`."""

    @classmethod
    def of_heads(cls, layers: Sequence[int], heads: int, n_layers: int) -> Self:
        """All heads of some layers; tensors have a row for every layer of the model, NaN at the others."""
        rows = {
            "layer": [layer for layer in layers for _ in range(heads)],
            "head": [head for _ in layers for head in range(heads)],
        }
        return cls(
            rows,
            tuple(rows.values()),
            lambda place: f"L{layers[place[0]]}H{place[1]}",
            layers=layers,
            spread=lambda measured: by_layer(measured, layers, n_layers),
        )

    def in_rows(self, values: Tensor) -> list[Any]:
        """The values `[*place]` in the order of the table's rows."""
        chosen: list[Any] = values[self.index].tolist()
        return chosen


@public
@dataclass(frozen=True, eq=False, repr=False)
class Quantity:
    """A statistic of a result, as `result["effect"]`: its means over texts, with their intervals and tests.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> entropy = am.attention_focus(am.load(), documents(6))["entropy"]
    >>> low, high = entropy.interval()
    >>> low.shape, bool((low <= entropy.mean).all())
    (torch.Size([4, 8]), True)

    Tensors have the axes of the result's own, usually `[layer head]`. Copies of a text count as one text.
    """

    statistic: Statistic
    """The declaration: its meaning, label, unit and bounds."""
    every: TextMeans
    """The sums of each text, copies included, at the places measured."""
    means: TextMeans
    """The means over distinct texts."""
    places: Places
    bounds: tuple[float, float]
    """The bounds to which intervals are clamped."""
    part: int | None = None
    """The place of the statistic along the first axis of `means`, if intervals and tests hold for several together."""

    @property
    def own(self) -> TextMeans:
        """The means of this statistic alone, so that its tests are not corrected for others."""
        return self.means if self.part is None else TextMeans(self.means.above[self.part], self.means.below[self.part])

    @cached_property
    def mean(self) -> Float[Tensor, "*place"]:
        """The mean over texts; NaN where nothing was measured."""
        return self._all(self.means.mean)

    @property
    def per_text(self) -> Float[Tensor, "*place text"]:
        """The value on each text, copies included; NaN where a text has none."""
        return torch.stack([self.places.spread(values) for values in self.every.per_text.unbind(-1)], dim=-1)

    @property
    def texts(self) -> Int[Tensor, "*place"]:
        """The number of distinct texts behind each mean."""
        return self._count(self.means.texts)

    def interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Low and high end of the pointwise t interval over texts; NaN for fewer than five texts."""
        return self._ends(self.means.interval(checked_level(level)))

    def simultaneous(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Simultaneous intervals: they hold for all places together, and therefore also for one picked afterwards.

        Source: `attnmech.maths.intervals`: studentised max-T, with heavy-tailed places in a separate group.
        """
        return self._ends(self.means.simultaneous(checked_level(level)))

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether more texts than chance allows have the sign of the mean.

        Decided by an exact sign test at 5 %, corrected for all places by Holm's procedure; `clear_size` says whether
        the mean also differs from 0. Source: `attnmech.maths.intervals`.
        """
        return self._count(self.means.clear).bool()

    @property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """Whether the simultaneous 95 % interval of the mean excludes 0, and no single text dominates (`one_text`)."""
        return self._count(self.means.clear_size).bool()

    @property
    def agreeing(self) -> Int[Tensor, "*place"]:
        """The number of texts on which the value has the sign of the mean."""
        return self._count(self.means.agreeing)

    @property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ |value|; intervals of such means are too narrow."""
        return self._count(self.means.one_text).bool()

    def to_frame(self) -> pd.DataFrame:
        """One row per place: its mean, interval, `agreeing`, `clear`, `clear_size`, `one_text` and `texts`."""
        columns = self.columns(clarity="") | {"texts": self.texts}
        return pd.DataFrame(
            {**self.places.columns, **{name: self.places.in_rows(value) for name, value in columns.items()}}
        )

    def columns(self, clarity: str | None = None) -> dict[str, Tensor]:
        """The columns of a table: the mean, `_low` and `_high`, and `CLARITY` with the prefix `clarity`, if given."""
        name, (low, high) = self.statistic.name, self.interval()
        columns = {name: self.mean, f"{name}_low": low, f"{name}_high": high}
        return columns if clarity is None else columns | {f"{clarity}{flag}": getattr(self, flag) for flag in CLARITY}

    def __repr__(self) -> str:
        return f'<"{self.statistic.name}" at {len(next(iter(self.places.columns.values())))} places>'

    def _ends(self, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = (self._all(end.clamp(*self.bounds)) for end in ends)
        return low, high

    def _all(self, measured: Tensor) -> Tensor:
        return self.places.spread(measured if self.part is None else measured[self.part])

    def _count(self, measured: Tensor) -> Tensor:
        return self._all(measured.double()).nan_to_num(0.0).long()
