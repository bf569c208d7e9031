"""Compares the estimates of attribution patching with exact effects, on the strongest nodes and on some at random."""

import math
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.public import public
from ...draw.text import with_minus_signs
from ...maths.copies import distinct_of
from ...maths.intervals import TextMeans
from ...maths.ranks import rank_correlation
from ...results.sentences import no_interval
from .figures import confirmed
from .formulas import count_interval


@public
@dataclass(frozen=True, eq=False, repr=False)
class Confirmation:
    """The exact effects of the nodes (or edges) with the strongest estimates, and of controls drawn at random from all
    others.

    A node (or edge) holds if the simultaneous 95 % interval of its exact effect, over all of them, excludes 0, no
    single pair dominates, and the estimate has the effect's sign.
    """

    names: tuple[str, ...]
    """What was measured, such as "L2H3", "L2 MLP", or "L0H2 → L2H5 v"."""
    estimate: Float[Tensor, " node"]
    per_pair: Float[Tensor, "node pair"]
    """The exact effect of patching each node alone, on each pair of prompts."""
    control: Bool[Tensor, " node"]
    """True for controls, False for the strongest."""
    others: int
    """The number of nodes from which the controls were drawn: all except the strongest."""
    copies: tuple[int, ...] = ()
    """For each pair, the number of the first that is the same; empty if all differ."""

    @cached_property
    def _means(self) -> TextMeans:
        return TextMeans.of_values(self.per_pair, self.copies)

    @property
    def exact(self) -> Float[Tensor, " node"]:
        """The mean exact effect over pairs."""
        return self._means.mean

    @property
    def holds(self) -> Bool[Tensor, " node"]:
        """Whether the exact effect differs from 0 and has the sign of the estimate."""
        return self._means.clear_size & (self.exact.sign() == self.estimate.sign())

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation of estimate and exact effect, over all nodes measured; NaN if one is constant."""
        return rank_correlation(self.estimate, self.exact)

    @property
    def slope(self) -> float:
        """Σ estimate · exact / Σ estimate²: the exact effect per unit of the estimate, fitted through 0 to all nodes
        measured; NaN if all estimates are 0.
        """
        return float(self.estimate @ self.exact / (self.estimate @ self.estimate))

    @property
    def threshold(self) -> float:
        """The size of the weakest effect among the strongest nodes that hold.

        If none of them holds, that of the weakest control whose effect differs from 0; infinite if there is none.
        """
        held = self.holds & ~self.control
        counted = held if held.any() else self._means.clear_size & self.control
        return float(self.exact[counted].abs().min()) if counted.any() else float("inf")

    @property
    def missed(self) -> tuple[float, int, int]:
        """The number of nodes outside the strongest whose effect is at least `threshold`, with its exact 95 % interval.

        Controls are a simple random sample of these nodes, so the number among them is hypergeometric. NaN without
        controls.
        """
        drawn = int(self.control.sum())
        if not drawn:
            return float("nan"), 0, self.others
        marked = int((self.exact[self.control].abs() >= self.threshold).sum())
        return self.others * marked / drawn, *count_interval(marked, drawn, self.others)

    def to_frame(self) -> pd.DataFrame:
        """One row per node measured: node, control, estimate, exact, exact_low, exact_high (simultaneous), holds."""
        low, high = self._means.simultaneous()
        columns = {"control": self.control, "estimate": self.estimate, "exact": self.exact, "exact_low": low}
        columns |= {"exact_high": high, "holds": self.holds}
        return pd.DataFrame({"node": self.names, **{name: value.numpy() for name, value in columns.items()}})

    def plot(self) -> "go.Figure":
        """The exact effect of each node over its estimate, with simultaneous intervals; on the line, both are equal."""
        return confirmed(self.to_frame())

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        pairs, strongest, drawn = self.per_pair.shape[1], int((~self.control).sum()), int(self.control.sum())
        held = int((self.holds & ~self.control).sum())
        few = no_interval(distinct_of(self.copies, pairs)).replace("text", "pair")
        if strongest == 1:
            known = f"the strongest {'holds' if held else 'does not hold'}"
            unknown = "whether the strongest holds"
        else:
            known = f"{held} of the {strongest} strongest {'holds' if held == 1 else 'hold'}"
            unknown = f"whether the {strongest} strongest hold"
        holding = f"{unknown} is unknown{few}" if few else known
        numbers = {"rank correlation": self.rank_correlation, "slope": self.slope}
        agreement = " and ".join(f"{name} {value:.2f}" for name, value in numbers.items() if not math.isnan(value))
        agreement = f"{agreement} with exact patching" if agreement else "all estimates are 0"
        return with_minus_signs(f"{holding}; {'' if few or not drawn else f'{self._missing}; '}{agreement}.")

    @property
    def _missing(self) -> str:
        """What the controls say about the nodes that were not confirmed."""
        count, low, high = self.missed
        strong = "are as strong" if (self.holds & ~self.control).any() else "have a clear effect"
        if int(self.control.sum()) == self.others:
            return f"{count:.0f} of the {self.others} others {strong} (all measured)"
        return f"about {count:.0f} of {self.others} others {strong} (95 %: {low} to {high})"

    def __repr__(self) -> str:
        return f"Confirmation({self.lead})"
