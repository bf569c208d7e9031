"""The mean drift of tokens, layer by layer, by type of token, with intervals over texts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import option
from ...maths.intervals import TextMeans
from ...maths.statistic import Statistic
from ...results.quantity import Places
from ...runs.summed import SummedTable
from .sums import STATISTICS, DriftStatistics
from .word_types import ORDINARY, WORD_TYPES


@dataclass(frozen=True, repr=False)
class DriftMeans(DriftStatistics, SummedTable):
    """The means of drift, computed from sums over texts."""

    MAIN = "cosine"
    anisotropy = Statistic(
        meaning="Mean cosine of two ordinary tokens of the same text and layer: (‖Σ ŷ‖² − n) / (n (n − 1)), over all "
        "pairs (Ethayarajh 2019, with all pairs instead of random ones).",
        unit="mean cosine",
        printed=True,
        bounds=(-1.0, 1.0),
    )

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

    types: tuple[str, ...] = field(default=ORDINARY, kw_only=True)
    """The types of token over which means are taken; by default ordinary tokens, which are all but the first token of a
    text and special tokens."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that other fields determine."""
        return {"statistic": len(STATISTICS), "type": len(WORD_TYPES), "layer": len(self.layers)}

    @property
    def anisotropy_across(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of different texts; NaN for one text."""
        within = self.state["pairs"].sum(dim=-1) + self.state["unit_counts"].sum(dim=-1)
        count = self.state["unit_counts"].sum(dim=-1) ** 2 - self.state["squares"].sum(dim=-1)
        across = (self.state["units"].square().sum(dim=-1) - within) / count
        return self._by_layer(across.masked_fill(count <= 0, torch.nan))

    def of_types(self, types: str | Iterable[str]) -> Self:
        """The same result over tokens of some types (see `by_type`).

        >>> drift.of_types("comma")["cosine"].interval()               # doctest: +SKIP
        """
        named = (types,) if isinstance(types, str) else tuple(types)
        return replace(self, types=tuple(option("types", name, WORD_TYPES) for name in named))

    def by_type(self, statistic: str) -> pd.DataFrame:
        """One row per layer and type of token that occurs: the mean, its interval, and the number of tokens."""
        rows = []
        for name in WORD_TYPES:
            quantity = self.of_types(name)[statistic]
            low, high = quantity.interval()
            for place, layer in enumerate(self.layers):
                count = int(quantity.means.below[place].sum())
                if count:
                    ends = {f"{statistic}_low": float(low[layer]), f"{statistic}_high": float(high[layer])}
                    value = {statistic: float(quantity.mean[layer])}
                    rows.append({"layer": layer, "type": name, **value, **ends, "tokens": count})
        return pd.DataFrame(rows)

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {"anisotropy_across": self.anisotropy_across}

    @property
    def _places(self) -> Places:
        return Places(
            {"layer": self.layers},
            (list(self.layers),),
            lambda place: f"layer {self.layers[place[0]]}",
            things="layers",
            layers=self.layers,
            spread=self._by_layer,
        )

    def _by_text(self, name: str) -> TextMeans:
        if name == "anisotropy":
            return TextMeans.of_ratio(self.state["pairs"], self.state["pair_counts"])
        place, chosen = STATISTICS.place(name), [WORD_TYPES.index(kind) for kind in self.types]
        sums, counts = (self.state[entry][place][chosen].sum(dim=0) for entry in ("sums", "counts"))
        return TextMeans.of_ratio(sums, counts)
