"""What estimates of nodes and of edges have in common: intervals over pairs, and the comparison with exact effects."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Self

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import finite_number, option, whole_number
from ...basics.messages import capitalised
from ...basics.public import public
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...maths.copies import distinct_of
from ...maths.intervals import TextMeans
from ...maths.ranks import rank_correlation
from ...maths.statistic import UNBOUNDED, Statistic
from ...results.by_layer import subtracted
from ...results.circuit import Circuit
from ...results.graph import Graph, head_of
from ...results.quantity import Places
from ...results.sentences import no_interval, unit_of
from ...results.table import require_no_head, require_one_figure
from ...runs.ablations import checked_seed
from ...runs.effects import Changes
from .figures import confirmed, edge_graph
from .formulas import METHODS, count_interval
from .stability import Stability, frequency_and_overlap


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
    def _slope(self) -> float:
        """Σ estimate · exact / Σ estimate²: the exact effect per unit of the estimate, fitted through 0 to all nodes
        measured; NaN if all estimates are 0.
        """
        return float(self.estimate @ self.exact / (self.estimate @ self.estimate))

    @property
    def _threshold(self) -> float:
        """The size of the weakest effect among the strongest nodes that hold.

        If none of them holds, that of the weakest control whose effect differs from 0; infinite if there is none.
        """
        held = self.holds & ~self.control
        counted = held if held.any() else self._means.clear_size & self.control
        return float(self.exact[counted].abs().min()) if counted.any() else float("inf")

    @property
    def missed(self) -> tuple[float, int, int]:
        """The number of nodes outside the strongest whose effect is at least that of the weakest of these that holds,
        with its exact 95 % interval.

        Controls are a simple random sample of these nodes, so the number among them is hypergeometric. NaN without
        controls.
        """
        drawn = int(self.control.sum())
        if not drawn:
            return float("nan"), 0, self.others
        marked = int((self.exact[self.control].abs() >= self._threshold).sum())
        return self.others * marked / drawn, *count_interval(marked, drawn, self.others)

    def to_frame(self) -> pd.DataFrame:
        """One row per node measured: node, control, estimate, exact, exact_low, exact_high (simultaneous), holds."""
        low, high = self._means.simultaneous()
        columns = {"control": self.control, "estimate": self.estimate, "exact": self.exact, "exact_low": low}
        columns |= {"exact_high": high, "holds": self.holds}
        return pd.DataFrame({"node": self.names, **{name: value.numpy() for name, value in columns.items()}})

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """The exact effect of each node over its estimate, with simultaneous intervals; on the line, both are equal."""
        require_one_figure(figure)
        require_no_head(layer, head)
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
        numbers = {"rank correlation": self.rank_correlation, "slope": self._slope}
        agreement = " and ".join(f"{name} {value:.2f}" for name, value in numbers.items() if not math.isnan(value))
        agreement = f"{agreement} with exact patching" if agreement else "all estimates are 0"
        return with_minus_signs(f"{holding}; {'' if few or not drawn else f'{self._missing}; '}{agreement}.")

    @property
    def _missing(self) -> str:
        count, low, high = self.missed
        strong = "are as strong" if (self.holds & ~self.control).any() else "have a clear effect"
        if int(self.control.sum()) == self.others:
            return f"{count:.0f} of the {self.others} others {strong} (all measured)"
        return f"about {count:.0f} of {self.others} others {strong} (95 %: {low} to {high})"

    def __repr__(self) -> str:
        return f"Confirmation({self.lead})"


@dataclass(frozen=True, repr=False)
class Estimates(Changes):
    """Estimates of effects on a metric; a subclass says of what, and names the places."""

    _MAIN = "effect"
    _SAMPLE = "pair"
    _AXES: ClassVar = {"pair": "tokens"}
    effect = Statistic(meaning="The mean estimate over pairs.", tested=True, bounds=UNBOUNDED, axes="*place")

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
        name = self._MAIN if by is None else option("by", by, self.quantities)
        frame = self.to_frame()
        order = by_size(torch.tensor(frame[name]))[: whole_number("count", count, least=1)]
        rows = frame.iloc[order].reset_index(drop=True)
        rows.attrs = frame.attrs
        return rows

    def circuit(self, size: int | float) -> Circuit:
        """The circuit of the nodes, or of the edges, with the largest estimates of either sign.

        Edges are chosen one by one, among edges into the logits and into nodes from which an edge was chosen before, so
        that all are connected to the logits (the greedy search of Hanna et al. 2024); there may be fewer than `size`.

        Args:
            size: a number of nodes or edges (an int), or a share of all (a float up to 1).
        """
        return self._circuits([self._checked_size(size)])[0]

    def stability(self, size: int | float, *, draws: int = 100, threshold: float = 0.9, seed: int = 0) -> Stability:
        """Chooses the circuit of `size` again on random halves of the pairs, and says which nodes (or edges) stay.

        Each draw splits the pairs into two halves, and the circuit is chosen on both, as `circuit` does. No model runs.
        Frequency alone would also call noise stable if it is larger at some nodes than at others, so a stable node (or
        edge) has a clear sign too.

        >>> import attnmech as am
        >>> words = ["boat", "shell", "lamp", "letter", "rope", "map", "stone", "key", "net", "drum", "bell"]
        >>> prompts = [f"The {word}s to the chest" for word in words], [f"The {word} to the chest" for word in words]
        >>> attribution = am.attribute(am.load(), *prompts, answers=[" are"] * 11, against=[" is"] * 11)
        >>> stability = attribution.stability(3)
        >>> stability.circuit, round(stability.jaccard, 1)
        (Circuit of 2 nodes: L2H3, L3H3, 0.6)

        Args:
            size: as in `circuit`.
            draws: the number of splits into two halves.
            threshold: the least share of the halves that choose a stable node (or edge).
            seed: the seed of the splits.

        Returns:
            The frequency of each node (or edge), the stable ones as a circuit, and the Jaccard index of the circuits of
            two halves with its interval over pairs.

        Raises:
            InputError: for fewer than five different pairs.

        Source: Meinshausen & Bühlmann 2010; Shah & Samworth 2013 (complementary pairs).
        """
        size, draws = self._checked_size(size), whole_number("draws", draws, least=1)
        threshold = finite_number("threshold", threshold, above=0.5, below=1.0)
        index, means = self._places.index, self._main.means
        rows, clear = TextMeans(means.above[index], means.below[index]), self.clear[index]
        frequency, jaccard, ends = frequency_and_overlap(
            rows, lambda values: self._chosen(values, size), draws, checked_seed(seed)
        )
        circuit = self._circuit_of(((frequency >= threshold) & clear).nonzero()[:, 0].tolist())
        names = tuple(self._name_of(place) for place in torch.stack(index, dim=1).tolist())
        pairs = rows.above.shape[1]
        return Stability(
            names, self.effect[index], frequency, clear, size, threshold, pairs, jaccard, ends, circuit
        )  # fmt: skip

    def _checked_size(self, size: int | float) -> int:
        """The number of nodes or edges in a circuit."""
        if isinstance(size, float) and size <= 1:
            return self._number(finite_number("size", size, above=0.0))
        count, things = len(self._places.index[0]), f"the number of {self._things}"
        return whole_number("size", size, least=1, most=count, most_is=things)

    def _number(self, share: float) -> int:
        """The number of nodes or edges in a share of all."""
        return max(1, int(share * len(self._places.index[0])))

    def _circuits(self, sizes: Sequence[int]) -> list[Circuit]:
        """The circuits of some sizes: each begins with the nodes or edges of the smaller ones."""
        order = self._chosen(self.effect[self._places.index], max(sizes))
        return [self._circuit_of(order[:size]) for size in sizes]

    @abstractmethod
    def _chosen(self, values: Float[Tensor, " row"], size: int) -> list[int]:
        """The rows of the table that a circuit of a size takes, in order, for some estimates."""

    @abstractmethod
    def _circuit_of(self, rows: Sequence[int]) -> Circuit:
        """The circuit of some rows of the table."""

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
        if self.parts is not None:
            return super().lead
        confirmation = self.confirmation
        if confirmation is not None:
            return capitalised(f"{self._about}: {confirmation.lead}")
        largest = self._largest(self._MAIN, unit=unit_of(self.metric), what="estimate")
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


SHOWN: Final = 40
"""The number of edges in the figure."""
LISTED: Final = 200
"""The number of edges in the table of the page."""
SHARES: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The sizes of circuits, as shares of all edges, at which MIB measures faithfulness."""


@dataclass(frozen=True, repr=False)
class EdgeAttribution(Estimates):
    """Estimates of the effects on a metric of giving one input what one node writes in the clean run.

    `effect [edge]` is in the metric's unit; `edges` has the sender and the receiver of each. The estimates of the edges
    from a head add up to the estimate for the head (`Attribution`).
    """

    _TITLE = "Attribution of {metric} to edges"
    graph: Graph

    @property
    def edges(self) -> Int[Tensor, "edge 2"]:
        """The places of sender and receiver among `graph.senders` and `graph.receivers`."""
        return self.graph.edges

    def circuits(self, by: str = "greedy") -> list[Circuit]:
        """The circuits of 0.1 %, 0.2 %, 0.5 %, 1 %, 2 %, 5 %, 10 %, 20 %, 50 % and 100 % of the edges, for
        `am.faithfulness`; sizes that hold the same edges appear once.

        Args:
            by: "greedy", connected to the logits as `circuit` chooses them; or MIB's choices, the largest estimates
                wherever their edges are: "score", signed, for its CPR, or "size", of either sign, for its CMD.
        """
        sizes = list(dict.fromkeys(map(self._number, SHARES)))
        if option("by", by, ("greedy", "score", "size")) == "greedy":
            return self._circuits(sizes)
        values = self.effect if by == "score" else self.effect.abs()
        order: list[int] = values.argsort(descending=True, stable=True).tolist()
        return [self._circuit_of(order[:size]) for size in sizes]

    def _chosen(self, values: Float[Tensor, " row"], size: int) -> list[int]:
        return self.graph.greedy(values.tolist(), size)

    def _circuit_of(self, rows: Sequence[int]) -> Circuit:
        return Circuit(edges=tuple(self.graph.names[row] for row in rows))

    def _ends_of(self, index: Int[Tensor, "axis place"]) -> Mapping[str, Sequence[Any]]:
        senders, receivers = zip(*(self.graph.names[place] for place in index[0].tolist()), strict=True)
        return {"sender": senders, "receiver": receivers}

    def by_node(self, end: str = "sender") -> pd.DataFrame:
        """One row per sender or receiver: the sum of the estimates of its edges, with its interval.

        Sender: all inputs read its clean output. Receiver: only this input reads the clean stream.

        Args:
            end: "sender" (the embedding, heads, MLPs) or "receiver" (q, k and v of heads, MLPs, the logits).
        """
        names = {"sender": self.graph.senders, "receiver": self.graph.receivers}
        sums = self._sums(("sender", "receiver").index(option("end", end, names)))
        return pd.DataFrame({end: names[end], **{name: value.numpy() for name, value in sums.items()}})

    def by_head(self) -> pd.DataFrame:
        """One row per head: the sum of the estimates of the edges from it, with its interval."""
        heads = {place: head for place, node in enumerate(self.graph.senders) if (head := head_of(node))}
        layer, head = zip(*heads.values(), strict=True)
        columns = {name: value[[*heads]].numpy() for name, value in self._sums(0).items()}
        return pd.DataFrame({"layer": layer, "head": head, **columns})

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """The strongest edges as a graph, layers upward: the wider, the stronger; solid edges hold when measured."""
        require_no_head(layer, head)
        strongest = self.strongest(SHOWN)
        confirmation = self.confirmation
        held: set[str] = set()
        if confirmation is not None:
            held = {name for name, holds in zip(confirmation.names, confirmation.holds.tolist(), strict=True) if holds}
        ends = zip(strongest["sender"], strongest["receiver"], strict=True)
        return edge_graph(strongest, self.graph, [edge_name(*two) in held for two in ends], self._label_of(self._MAIN))

    def _sums(self, end: int) -> dict[str, Tensor]:
        """The columns of a table of senders (0) or receivers (1): the sums over their edges."""
        count = len(self.graph.senders if end == 0 else self.graph.receivers)
        sums = torch.zeros(count, self.per_pair.shape[1], dtype=self.per_pair.dtype)
        every = TextMeans.of_values(sums.index_add_(0, self.edges[:, end], self.per_pair))
        return replace(self._main, every=every, means=every.merged(self.provenance.copies)).columns("")

    def _check(self) -> None:
        super()._check()
        if len(self.edges) != len(self.per_pair):
            raise ValueError("`per_pair` must have a row for each edge of `graph`")

    @property
    def _things(self) -> str:
        return "edges"

    def _name_of(self, place: Sequence[int]) -> str:
        return edge_name(*self.graph.names[place[0]])

    @property
    def _table(self) -> pd.DataFrame:
        if len(self.edges) <= LISTED:
            return self.to_frame()
        rows = self.strongest(LISTED)
        note = f"The {LISTED} edges with the largest estimates, of {len(self.edges)}; `to_frame()` has all."
        rows.attrs["intervals"] = f"{note} {rows.attrs['intervals']}"
        return rows

    def _sections(self) -> "Sequence[Section]":
        solid = "none was measured"
        if self.exact is not None:
            solid = "solid edges hold when measured, dotted ones do not, or were not measured"
        shown = min(SHOWN, len(self.edges))
        reading = (
            f"The {shown} edges with the largest estimates; {solid}. Width is the size of the estimate; blue edges "
            "raise the metric, brown ones lower it. Numbers are heads."
        )
        sections = [Section("Edges", reading, {"edges": self.plot()}, "attribution.plot()")]
        return [*sections, *self._exact_sections()]

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"graph": self.graph}


def edge_name(sender: str, receiver: str) -> str:
    """The name of an edge in a sentence."""
    return f"{sender} → {receiver}"
