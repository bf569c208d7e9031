"""The mean drift of tokens, layer by layer, by type of token, with intervals over texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import option
from ...maths.intervals import LEAST_TEXTS, LEVEL, TextMeans, checked_level
from ...maths.statistic import WithStatistics
from ...results.by_layer import by_layer
from ...runs.claims import interval_note
from ...runs.summed import Summed
from .sums import STATISTICS
from .word_types import ORDINARY, WORD_TYPES


@dataclass(frozen=True, repr=False)
class DriftMeans(WithStatistics, Summed):
    """The means of drift, computed from sums over texts."""

    STATISTICS = STATISTICS

    STATE: ClassVar[Mapping[str, Any]] = {
        "sums": Float[Tensor, "statistic type layer group"],
        "counts": Float[Tensor, "statistic type layer group"],
        "pairs": Float[Tensor, "layer group"],
        "pair_counts": Float[Tensor, "layer group"],
        "unit_counts": Float[Tensor, "layer group"],
        "squares": Float[Tensor, "layer group"],
        "units": Float[Tensor, "layer d_model"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }
    """The types of the entries of `state`."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that other fields determine."""
        return {"statistic": len(STATISTICS), "type": len(WORD_TYPES), "layer": len(self.layers)}

    @property
    def anisotropy(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of the same text and layer: (‖Σ ŷ‖² − n) / (n (n − 1)), over all pairs.

        Source: Ethayarajh 2019, with all pairs instead of random ones.
        """
        return self._by_layer(self._pairs.mean)

    @property
    def anisotropy_across(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of different texts; NaN for one text."""
        within = self.state["pairs"].sum(dim=-1) + self.state["unit_counts"].sum(dim=-1)
        count = self.state["unit_counts"].sum(dim=-1) ** 2 - self.state["squares"].sum(dim=-1)
        across = (self.state["units"].square().sum(dim=-1) - within) / count
        return self._by_layer(across.masked_fill(count <= 0, torch.nan))

    def mean(self, statistic: str, types: str | Iterable[str] | None = None) -> Float[Tensor, " layer"]:
        """Returns the mean of a statistic over tokens of some types (see `by_type`), by default ordinary tokens."""
        return self._by_layer(self._means(statistic, types).mean)

    def _value_of(self, statistic: str) -> Float[Tensor, " layer"]:
        return self.mean(statistic)

    def interval(
        self, statistic: str, types: str | Iterable[str] | None = None, level: float = LEVEL
    ) -> tuple[Float[Tensor, " layer"], Float[Tensor, " layer"]]:
        """Low and high ends of the pointwise t interval of `mean` over texts; NaN for fewer than five texts."""
        low, high = self._bounded(statistic, self._means(statistic, types).interval(checked_level(level)))
        return self._by_layer(low), self._by_layer(high)

    def _bounded(self, statistic: str, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Clamps an interval to the bounds of its statistic."""
        lowest, highest = STATISTICS[statistic].bounds
        return ends[0].clamp(lowest, highest), ends[1].clamp(lowest, highest)

    def by_type(self, statistic: str) -> pd.DataFrame:
        """One row per layer and type of token that occurs: the mean, its interval, and the number of tokens."""
        rows = []
        for name in WORD_TYPES:
            means = self._means(statistic, name)
            low, high = self._bounded(statistic, means.interval())
            for place, layer in enumerate(self.layers):
                count = int(means.below[place].sum())
                if count:
                    ends = {f"{statistic}_low": float(low[place]), f"{statistic}_high": float(high[place])}
                    value = {statistic: float(means.mean[place])}
                    rows.append({"layer": layer, "type": name, **value, **ends, "tokens": count})
        return pd.DataFrame(rows)

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: every statistic of ordinary tokens with its interval, and the cosines of pairs."""
        columns: dict[str, Tensor] = {}
        for name in STATISTICS:
            columns |= {name: self.mean(name)} | self._ends(name, self.interval(name))
        ends = [self._by_layer(end) for end in self._pairs.interval()]
        columns |= {"anisotropy": self.anisotropy} | self._ends("anisotropy", ends)
        columns["anisotropy_across"] = self.anisotropy_across
        chosen = list(self.layers)
        frame = pd.DataFrame({"layer": chosen, **{name: column[chosen].tolist() for name, column in columns.items()}})
        frame.attrs["intervals"] = interval_note(self._texts_counted, self.documents - self._distinct)
        return frame

    def _ends(self, name: str, ends: Sequence[Tensor]) -> dict[str, Tensor]:
        """The columns of an interval; none for fewer than five texts."""
        return dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True)) if self._has_intervals else {}

    @property
    def _has_intervals(self) -> bool:
        return self._texts_counted >= LEAST_TEXTS

    @property
    def _texts_counted(self) -> int:
        return len(self.state["groups"])

    @cached_property
    def _pairs(self) -> TextMeans:
        return TextMeans.of_ratio(self.state["pairs"], self.state["pair_counts"])

    def _means(self, statistic: str, types: str | Iterable[str] | None) -> TextMeans:
        place = STATISTICS.place(option("statistic", statistic, STATISTICS))
        named = ORDINARY if types is None else (types,) if isinstance(types, str) else tuple(types)
        chosen = [WORD_TYPES.index(option("types", name, WORD_TYPES)) for name in named]
        sums, counts = (self.state[name][place][chosen].sum(dim=0) for name in ("sums", "counts"))
        return TextMeans.of_ratio(sums, counts)

    def _by_layer(self, measured: Tensor) -> Tensor:
        return by_layer(measured, self.layers, self.n_layers)
