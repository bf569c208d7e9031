"""What estimates of nodes and of edges have in common: intervals over pairs, and the comparison with exact effects."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import option, whole_number
from ...basics.messages import capitalised
from ...draw.section import Section
from ...results.by_layer import subtracted
from ...results.over_texts import OverTexts
from ...results.provenance import Provenance
from ...results.result import TextResult
from ...runs.claims import interval_note, largest_of
from ...runs.effects import unit_of
from .confirmation import Confirmation
from .formulas import METHODS


@dataclass(frozen=True, repr=False)
class Estimates(OverTexts, TextResult):
    """Estimates of effects on a metric; a subclass says of what, and names the places."""

    method: str
    nodes: str
    """ "heads" or "heads+mlps"."""
    metric: str
    before: Float[Tensor, " pair"]
    """The metric of each corrupted prompt."""
    per_pair: Float[Tensor, "*place pair"]
    """The estimate on each pair; NaN where there is none."""
    exact: Float[Tensor, "*place pair"] | None
    """The exact effects of what `confirm` measured, NaN for the others; None without `confirm`."""
    controls: Float[Tensor, "*place"] | None
    """1 for what was measured as a control, else 0; None without `confirm`."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens of the corrupted prompts."""
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The length of the axis labelled by pairs."""
        return {"pair": len(self.tokens)}

    def _check(self) -> None:
        super()._check()
        option("method", self.method, METHODS)
        if (self.exact is None) != (self.controls is None):
            raise ValueError("`exact` and `controls` must both be there, or neither")

    @property
    def effect(self) -> Float[Tensor, "*place"]:
        """The mean estimate over pairs."""
        return self.per_pair.mean(dim=-1)

    @property
    def _measured_values(self) -> Float[Tensor, "*place pair"]:
        return self.per_pair

    @property
    @abstractmethod
    def _things(self) -> str:
        """What is patched: "heads", "nodes" or "edges"."""

    @abstractmethod
    def _name_of(self, place: Sequence[int]) -> str:
        """The name of what is patched at a place."""

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The rows of `to_frame` with the largest estimates of either sign: those that `confirm` measures first."""
        frame = self.to_frame()
        order = by_size(self.effect[~self.effect.isnan()])[: whole_number("count", count, least=1)]
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
        return Confirmation(names, self.effect[measured], self.exact[measured], control, others, tuple(self._copies))

    def _rows(self, places: Mapping[str, Any]) -> pd.DataFrame:
        """One row per estimate: its place, effect, effect_low, ..., and with `confirm` the mean exact effect."""
        columns = self._columns("effect")
        if self.exact is not None:
            columns["exact"] = self.exact.mean(dim=-1)
        there = ~self.effect.isnan()
        frame = pd.DataFrame({**places, **{name: value[there].numpy() for name, value in columns.items()}})
        frame.attrs["intervals"] = interval_note(self._n_distinct, self._n_texts - self._n_distinct).replace(
            "text", "pair"
        )
        return frame

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

    @property
    def _labels(self) -> Mapping[str, str]:
        return {"effect": f"estimated change ({unit_of(self.metric)})"}

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        count, pairs = int((~self.effect.isnan()).sum()), self._texts.replace("text", "pair")
        subject = f"{self._opening}{METHODS[self.method]} of patching each of {count} {self._things} on {pairs}"
        confirmation = self.confirmation
        finding = f"{self._largest}." if confirmation is None else confirmation.lead
        return capitalised(f"{subject}: {finding}")

    @property
    def _largest(self) -> str:
        """What the estimates alone say."""
        largest = largest_of(
            self,
            self._means,
            self._name_of,
            things=self._things,
            unit=unit_of(self.metric),
            what="estimate" if self.parts is None else "difference",
        )
        return largest if self.parts is not None else f"{largest}; not compared with exact patching"

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _minus(self, other: Self, paired: bool) -> Self:
        return replace(
            self,
            before=subtracted(self.before, other.before, paired),
            per_pair=subtracted(self.per_pair, other.per_pair, paired),
            exact=None,
            controls=None,
            tokens=self.tokens if paired else (),
        )

    def _comparable(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "method": self.method,
            "nodes": self.nodes,
            "steps": self.provenance.options.get("steps"),
            "shape": list(self.per_pair.shape[:-1]),
        }


def by_size(values: Float[Tensor, " place"]) -> list[int]:
    """The places of the values, the largest of either sign first."""
    order: list[int] = values.abs().argsort(descending=True, stable=True).tolist()
    return order
