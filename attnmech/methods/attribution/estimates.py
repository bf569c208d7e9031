"""What estimates of nodes and of edges have in common: intervals over pairs, and the comparison with exact effects."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import option, whole_number
from ...basics.messages import capitalised
from ...draw.section import Section
from ...maths.intervals import TextMeans
from ...maths.statistic import Statistic
from ...results.by_layer import subtracted
from ...results.quantity import Places
from ...runs.effects import Changes, unit_of
from .confirmation import Confirmation
from .formulas import METHODS


@dataclass(frozen=True, repr=False)
class Estimates(Changes):
    """Estimates of effects on a metric; a subclass says of what, and names the places."""

    MAIN = "effect"
    SAMPLE = "pair"
    effect = Statistic(
        meaning="The mean estimate over pairs.", tested=True, bounds=(-math.inf, math.inf), axes="*place"
    )

    method: str
    nodes: str
    """ "heads" or "heads+mlps"."""
    before: Float[Tensor, " pair"]
    """The metric of each corrupted prompt."""
    per_pair: Float[Tensor, "*place pair"]
    """The estimate on each pair; NaN where there is none."""
    exact: Float[Tensor, "*place pair"] | None
    """The exact effects of what `confirm` measured, NaN for the others; None without `confirm`."""
    controls: Float[Tensor, "*place"] | None
    """1 for what was measured as a control, else 0; None without `confirm`."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The length of the axis labelled by pairs."""
        return {"pair": len(self.tokens)}

    def _check(self) -> None:
        super()._check()
        option("method", self.method, METHODS)
        if (self.exact is None) != (self.controls is None):
            raise ValueError("`exact` and `controls` must both be there, or neither")

    complete = True
    """Everything is measured in one pass."""

    def _by_text(self, name: str) -> TextMeans:
        return TextMeans.of_values(self.per_pair)

    @property
    def _places(self) -> Places:
        index = (~self.per_pair.isnan().all(dim=-1)).nonzero().T
        return Places(self._ends_of(index), tuple(index), self._name_of, things=self._things)

    @abstractmethod
    def _ends_of(self, index: Int[Tensor, "axis place"]) -> Mapping[str, Sequence[Any]]:
        """The first columns of the table: what is patched at each place."""

    @property
    @abstractmethod
    def _things(self) -> str:
        """What is patched: "heads", "nodes" or "edges"."""

    @abstractmethod
    def _name_of(self, place: Sequence[int]) -> str:
        """The name of what is patched at a place."""

    def strongest(self, count: int = 10, by: str | None = None) -> pd.DataFrame:
        """The rows of `to_frame` with the largest estimates of either sign: those that `confirm` measures first."""
        name = self.MAIN if by is None else option("by", by, self.quantities)
        frame = self.to_frame()
        order = by_size(torch.tensor(frame[name]))[: whole_number("count", count, least=1)]
        rows = frame.iloc[order].reset_index(drop=True)
        rows.attrs = frame.attrs
        return rows

    @property
    def confirmation(self) -> Confirmation | None:
        """The comparison with exact effects; None without `confirm`, and for a difference."""
        if self.exact is None or self.controls is None:
            return None
        measured = ~self.exact.isnan().any(dim=-1)
        names = tuple(self._name_of(tuple(place)) for place in measured.nonzero().tolist())
        control = self.controls[measured] == 1
        others = int((~self.effect.isnan()).sum()) - int((~control).sum())
        return Confirmation(names, self.effect[measured], self.exact[measured], control, others, self.provenance.copies)

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {} if self.exact is None else {"exact": self.exact.mean(dim=-1)}

    def _exact_sections(self) -> "list[Section]":
        """The comparison with exact effects; empty without one."""
        confirmation = self.confirmation
        if confirmation is None:
            return []
        reading = (
            f"Each point is one of the {self._things} measured: its estimate, and its exact effect with the "
            f"simultaneous interval. Controls were drawn at random from all {self._things} except the strongest. "
            "On the dotted line, both are equal."
        )
        exact = {"confirmation": confirmation.plot()}
        return [Section("Exact effects", reading, exact, "attribution.confirmation.plot()")]

    def _label_of(self, name: str) -> str:
        return f"estimated {super()._label_of(name)}"

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        if self.parts is not None:
            return super().lead
        confirmation = self.confirmation
        if confirmation is not None:
            return capitalised(f"{self._about}: {confirmation.lead}")
        largest = self._largest(self.MAIN, unit=unit_of(self.metric), what="estimate")
        return capitalised(f"{self._about}: {largest}; not compared with exact patching.")

    @property
    def _about(self) -> str:
        count = len(self._places.index[0])
        return f"{self._opening}{METHODS[self.method]} of patching each of {count} {self._things} on {self._texts}"

    def _minus(self, other: Self, paired: bool) -> Self:
        per_pair = subtracted(self.per_pair, other.per_pair, paired)
        return self._difference(other, paired, per_pair=per_pair, exact=None, controls=None)

    def _comparable(self) -> dict[str, Any]:
        return {
            **super()._comparable(),
            "method": self.method,
            "nodes": self.nodes,
            "steps": self.provenance.options.get("steps"),
            "shape": list(self.per_pair.shape[:-1]),
        }


def by_size(values: Float[Tensor, " place"]) -> list[int]:
    """The places of the values, the largest of either sign first."""
    order: list[int] = values.abs().argsort(descending=True, stable=True).tolist()
    return order
