"""Mean attention between segments by their distance, with intervals over texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import option
from ...errors import InputError
from ...maths.intervals import TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...results.by_layer import table_of
from ...results.quantity import Places
from ...runs.summed import SummedTable
from .sums import lags_of

PARTS: Final = ("own", "previous", "further", "earlier", "later")
"""The parts of a row's attention: to its own segment, to the previous segment, to all segments before the previous one,
to all earlier segments, and to all later segments.
"""


def _excess(part: str) -> Statistic:
    meaning = f"`{part}` minus its baseline, attention by distance in tokens alone."
    return Statistic(meaning=meaning, label=f"{part}: share above baseline", tested=True, bounds=(-1.0, 1.0))


class SegmentStatistics:
    """Attention from a row to segments, and how much it exceeds the baseline by distance."""

    own = Statistic(meaning="Mean attention to the row's own segment.")
    previous = Statistic(meaning="Mean attention to the previous segment, over the rows that have one.")
    further = Statistic(meaning="Mean attention to all segments before the previous one, over the rows that have any.")
    earlier = Statistic(meaning="Mean attention to all earlier segments, over the rows that have any.")
    later = Statistic(meaning="Mean attention to all later segments, over the rows that have any.")
    own_excess = _excess("own")
    previous_excess = _excess("previous")
    further_excess = _excess("further")
    earlier_excess = _excess("earlier")
    later_excess = _excess("later")
    kurtosis = Statistic(
        meaning="The excess kurtosis of a head's receiver scores with this `gap`, averaged over texts with at least "
        "four scores. It is high where later segments attend to only a few earlier segments. As in Thought Anchors "
        "(arXiv 2506.19143): mean attention per pair of tokens, from segments at least `gap` later, biased moments, "
        "minus 3.",
        bounds=UNBOUNDED,
    )


@dataclass(frozen=True, repr=False)
class SegmentMeans(SegmentStatistics, SummedTable):
    """The means of attention between segments, computed from sums over texts."""

    _MAIN = "earlier_excess"
    _AXES: ClassVar = {"layer": "layers", "lag": "lags"}

    _STATE: ClassVar[Mapping[str, Any]] = {
        "sums": Float[Tensor, "lag layer head group"],
        "expected": Float[Tensor, "lag layer head group"],
        "counts": Float[Tensor, "lag 1 1 group"],
        "peaks": Float[Tensor, "layer head group"],
        "expected_peaks": Float[Tensor, "layer head group"],
        "peak_counts": Float[Tensor, "layer head group"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }

    kind: str
    """"sentence", "line", "document", "kind" or "span"."""
    first: bool
    """Whether attention to the first token of a text counts."""
    gap: int
    """The smallest distance, in segments, at which a later segment counts for kurtosis."""
    both_ways: bool
    """Whether tokens can attend to later ones."""

    @property
    def lags(self) -> tuple[int, ...]:
        """Distances in segments, in the order of the axis `lag`: 0 is a row's own segment, 1 the previous, −1 the next.

        The first and last entries also count all segments that are farther away.
        """
        return tuple(lags_of(self.both_ways))

    @property
    def by_lag(self) -> Float[Tensor, "layer head lag"]:
        """Mean attention to the segment at each lag, over the rows that have a segment there; NaN if no row has."""
        sums, counts = (self.state[entry].movedim(0, 2) for entry in ("sums", "counts"))
        return self._by_layer(TextMeans.of_ratio(sums, counts).mean)

    @property
    def receiver_heads(self) -> pd.DataFrame:
        """One row per head, highest kurtosis first: layer, head, kurtosis, its interval over texts, the columns
        `kurtosis_expected`, `receiver` and `texts`.

        `kurtosis_expected` is what attention by distance alone would give, but at least 0, the kurtosis of a normal
        distribution, averaged over texts. `receiver` claims that kurtosis exceeds it: the interval of the difference,
        simultaneous for all heads, is above 0.
        """
        peaks, state = self["kurtosis"].means, self.state
        low, high = peaks.interval()
        above = TextMeans.of_ratio(state["peaks"] - state["expected_peaks"], state["peak_counts"])
        claimed = above.simultaneous()[0] > 0
        expected = peaks.mean - above.mean
        columns = {"kurtosis": peaks.mean, "kurtosis_low": low, "kurtosis_high": high, "kurtosis_expected": expected}
        columns |= {"receiver": claimed, "texts": peaks.texts}
        frame = table_of({"layer": self.layers, "head": range(low.shape[1])}, columns)
        return frame.sort_values("kurtosis", ascending=False, kind="stable", ignore_index=True)

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the statistics; "later" only in models that look ahead."""
        return tuple(name for name in self.STATISTICS if self.both_ways or not name.startswith("later"))

    @property
    def _further(self) -> Mapping[str, Tensor]:
        parts = {part: self._part(part, self.state["expected"]) for part in PARTS if part in self.quantities}
        return {f"{part}_expected": self._by_layer(means.mean) for part, means in parts.items()}

    def _clarity_prefix(self, name: str) -> str | None:
        return f"{name}_" if self.STATISTICS[name].tested else None

    @property
    def _places(self) -> Places:
        return Places.of_heads(self.layers, self.state["peaks"].shape[1], self.n_layers)

    def _by_text(self, name: str) -> TextMeans:
        if name == "kurtosis":
            return TextMeans.of_ratio(self.state["peaks"], self.state["peak_counts"])
        sums = self.state["sums"]
        part = name.removesuffix("_excess")
        return self._part(part, sums if part == name else sums - self.state["expected"])

    def _part(self, part: str, sums: Tensor) -> TextMeans:
        zero = self.lags.index(0)
        places = {
            "own": ([zero], zero),
            "previous": ([zero + 1], zero + 1),
            "further": (range(zero + 2, len(self.lags)), zero + 2),
            "earlier": (range(zero + 1, len(self.lags)), zero + 1),
            "later": (range(zero), zero - 1),
        }
        if option("part", part, PARTS) == "later" and not self.both_ways:
            raise InputError("this model's tokens do not attend to later tokens; use another `part`.")
        chosen, counted = places[part]
        return TextMeans.of_ratio(sums[list(chosen)].sum(dim=0), self.state["counts"][counted].expand_as(sums[0]))
