"""The estimates of attribution patching for every edge of the residual graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Int
from torch import Tensor

from ...basics.arguments import option
from ...draw.section import Section
from ...maths.intervals import TextMeans
from ...results.circuit import Circuit
from ...results.graph import Graph, head_of
from ...results.table import require_no_head
from .estimates import Estimates
from .figures import edge_graph

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

    @property
    def _names(self) -> list[tuple[str, str]]:
        """(sender, receiver) of each edge, such as ("L0H3", "L2H1 k")."""
        senders, receivers = self.graph.senders, self.graph.receivers
        return [(senders[sender], receivers[receiver]) for sender, receiver in self.edges.tolist()]

    def circuits(self) -> list[Circuit]:
        """The circuits of 0.1 %, 0.2 %, 0.5 %, 1 %, 2 %, 5 %, 10 %, 20 %, 50 % and 100 % of the edges, for
        `am.faithfulness`; sizes that hold the same edges appear once.
        """
        return self._circuits(list(dict.fromkeys(map(self._number, SHARES))))

    def _circuits(self, sizes: Sequence[int]) -> list[Circuit]:
        """The greedy circuits of some sizes: each begins with the edges of the smaller ones."""
        names = self._names
        order = self.graph.greedy(names, self.effect.tolist(), max(sizes))
        return [Circuit(edges=tuple(names[place] for place in order[:size])) for size in sizes]

    def _ends_of(self, index: Int[Tensor, "axis place"]) -> Mapping[str, Sequence[Any]]:
        names = self._names
        senders, receivers = zip(*(names[place] for place in index[0].tolist()), strict=True)
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
        sender, receiver = self.edges[place[0]].tolist()
        return edge_name(self.graph.senders[sender], self.graph.receivers[receiver])

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
