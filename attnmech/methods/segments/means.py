"""Mean attention between segments by their distance, with intervals over texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import flag, option
from ...errors import InputError
from ...maths.intervals import LEVEL, TextMeans, checked_level
from ...results.by_layer import by_layer
from ...runs.claims import interval_note
from ...runs.summed import Summed
from .sums import lags_of

PARTS: Final = ("own", "previous", "further", "earlier", "later")
"""The parts of a row's attention: to its own segment, to the previous segment, to all segments before the previous one,
to all earlier segments, and to all later segments.
"""


@dataclass(frozen=True, repr=False)
class SegmentMeans(Summed):
    """The means of attention between segments, computed from sums over texts."""

    STATE: ClassVar[Mapping[str, Any]] = {
        "sums": Float[Tensor, "lag layer head group"],
        "expected": Float[Tensor, "lag layer head group"],
        "counts": Float[Tensor, "lag 1 1 group"],
        "peaks": Float[Tensor, "layer head group"],
        "expected_peaks": Float[Tensor, "layer head group"],
        "peak_counts": Float[Tensor, "layer head group"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }
    """The types of the entries of `state`."""

    kind: str
    """"sentence", "line", "document" or "span"."""
    first: bool
    """Whether attention to the first token of a text counts."""
    gap: int
    """The smallest distance, in segments, at which a later segment counts for kurtosis."""
    both_ways: bool
    """Whether tokens can attend to later ones."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that other fields define."""
        return {"layer": len(self.layers), "lag": len(self.lags)}

    @property
    def lags(self) -> tuple[int, ...]:
        """Distances in segments, in the order of the axis `lag`: 0 is a row's own segment, 1 the previous, −1 the next.

        The first and last entries also count all segments that are farther away.
        """
        return tuple(lags_of(self.both_ways))

    @property
    def by_lag(self) -> Float[Tensor, "layer head lag"]:
        """Mean attention to the segment at each lag, over the rows that have a segment there; NaN if no row has."""
        return self._by_layer(self._lag_means("sums").mean)

    @property
    def expected_by_lag(self) -> Float[Tensor, "layer head lag"]:
        """The baseline of `by_lag`: attention by distance in tokens alone."""
        return self._by_layer(self._lag_means("expected").mean)

    @property
    def own(self) -> Float[Tensor, "layer head"]:
        """Mean attention to the row's own segment."""
        return self.mean("own")

    @property
    def previous(self) -> Float[Tensor, "layer head"]:
        """Mean attention to the previous segment, over the rows that have one."""
        return self.mean("previous")

    @property
    def further(self) -> Float[Tensor, "layer head"]:
        """Mean attention to all segments before the previous one, over the rows that have any."""
        return self.mean("further")

    @property
    def earlier(self) -> Float[Tensor, "layer head"]:
        """Mean attention to all earlier segments, over the rows that have any."""
        return self.mean("earlier")

    def mean(self, part: str) -> Float[Tensor, "layer head"]:
        """The mean of one of `PARTS` over the rows of all texts that have such segments; NaN if there are none."""
        return self._by_layer(self._part(part).mean)

    def baseline(self, part: str) -> Float[Tensor, "layer head"]:
        """The mean of one of `PARTS` in the baseline by distance in tokens."""
        return self._by_layer(self._part(part, "expected").mean)

    def excess(self, part: str) -> Float[Tensor, "layer head"]:
        """`mean` − `baseline`."""
        return self.mean(part) - self.baseline(part)

    def interval(
        self, part: str, level: float = LEVEL, *, excess: bool = False
    ) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
        """Low and high ends of the pointwise t interval of the mean or its excess over texts; NaN for fewer than five
        texts.
        """
        means = self._excess(part) if flag("excess", excess) else self._part(part)
        low, high = means.interval(checked_level(level))
        return self._by_layer(low), self._by_layer(high)

    def clear(self, part: str) -> Tensor:
        """`[layer head]`: whether more texts than chance allows have an excess with the sign of the mean.

        The test is an exact sign test at 5 %, corrected for all heads. Source: `attnmech.maths.intervals`.
        """
        return self._by_layer(self._excess(part).clear.double()).nan_to_num(0.0).bool()

    @property
    def kurtosis(self) -> Float[Tensor, "layer head"]:
        """The excess kurtosis of a head's receiver scores with this `gap`, averaged over texts with at least four
        scores. It is high where later segments attend to only a few earlier segments. As in Thought Anchors (arXiv
        2506.19143): mean attention per pair of tokens, from segments at least `gap` later, biased moments, minus 3.
        """
        return self._by_layer(self._peaks.mean)

    @property
    def receiver_heads(self) -> pd.DataFrame:
        """One row per head, highest kurtosis first: layer, head, kurtosis, its interval over texts, the columns
        `kurtosis_expected`, `receiver` and `texts`.

        `kurtosis_expected` is what attention by distance alone would give, but at least 0, the kurtosis of a normal
        distribution, averaged over texts. `receiver` claims that kurtosis exceeds it: the interval of the difference,
        simultaneous for all heads, is above 0.
        """
        low, high = self._peaks.interval()
        state = self.state
        above = TextMeans.of_ratio(state["peaks"] - state["expected_peaks"], state["peak_counts"])
        claimed = above.simultaneous()[0] > 0
        expected = self._peaks.mean - above.mean
        index = [(row, head) for row in range(len(self.layers)) for head in range(low.shape[1])]
        frame = pd.DataFrame(
            {
                "layer": [self.layers[row] for row, _ in index],
                "head": [head for _, head in index],
                "kurtosis": self._peaks.mean.flatten().tolist(),
                "kurtosis_low": low.flatten().tolist(),
                "kurtosis_high": high.flatten().tolist(),
                "kurtosis_expected": expected.flatten().tolist(),
                "receiver": claimed.flatten().tolist(),
                "texts": self._peaks.texts.flatten().tolist(),
            }
        )
        return frame.sort_values("kurtosis", ascending=False, kind="stable", ignore_index=True)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: own, previous, further (and later, in models that look ahead), with their intervals, their
        baselines by distance (`_expected`) and whether they differ from the baselines (`_clear`); kurtosis.
        """
        columns: dict[str, Tensor] = {}
        for part in self._parts:
            low, high = self.interval(part)
            columns |= {part: self.mean(part), f"{part}_low": low, f"{part}_high": high}
            columns |= {f"{part}_expected": self.baseline(part), f"{part}_clear": self.clear(part)}
        columns["kurtosis"] = self.kurtosis
        heads, rows = self.own.shape[1], list(self.layers)
        frame = pd.DataFrame(
            {
                "layer": [layer for layer in rows for _ in range(heads)],
                "head": [head for _ in rows for head in range(heads)],
                **{name: value[rows].flatten().tolist() for name, value in columns.items()},
            }
        )
        frame.attrs["intervals"] = interval_note(len(self.state["groups"]), self.documents - self._distinct)
        return frame

    @property
    def _parts(self) -> tuple[str, ...]:
        return ("own", "previous", "further", *(["later"] if self.both_ways else []))

    def _lag_means(self, name: str) -> TextMeans:
        sums, counts = (self.state[entry].movedim(0, 2) for entry in (name, "counts"))
        return TextMeans.of_ratio(sums, counts)

    def _part(self, part: str, name: str = "sums") -> TextMeans:
        return TextMeans.of_ratio(*self._of_part(part, self.state[name]))

    def _excess(self, part: str) -> TextMeans:
        return TextMeans.of_ratio(*self._of_part(part, self.state["sums"] - self.state["expected"]))

    def _of_part(self, part: str, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the lags of a part, and the number of rows that have segments at these lags."""
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
        return sums[list(chosen)].sum(dim=0), self.state["counts"][counted].expand_as(sums[0])

    @cached_property
    def _peaks(self) -> TextMeans:
        return TextMeans.of_ratio(self.state["peaks"], self.state["peak_counts"])

    def _by_layer(self, measured: Tensor) -> Tensor:
        return by_layer(measured, self.layers, self.n_layers)
