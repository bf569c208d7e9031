"""The residual graph of a model: the nodes that write into the stream, the inputs that read it, and their edges."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

EMBEDDING: Final = "embedding"  # the first stream: embeddings of tokens and positions, after their norm
LOGITS: Final = "logits"
INPUTS: Final = ("q", "k", "v")  # the inputs of a head


def head_of(node: str) -> tuple[int, int] | None:
    """(layer, head) of a node; None for the embedding and MLPs.

    >>> head_of("L2H10"), head_of("L2 MLP")
    ((2, 10), None)
    """
    place = re.fullmatch(r"L(\d+)H(\d+)", node)
    return None if place is None else (int(place[1]), int(place[2]))


@dataclass(frozen=True)
class Graph:
    """The nodes and edges of a stack whose stream is the sum of what its nodes write.

    Senders write: the embedding, every head, and every MLP. Receivers read the stream of the senders below them: q, k
    and v of every head (k and v of every kv head), every MLP, and the logits. Without `mlps`, MLPs are no nodes.

    >>> graph = Graph(n_layers=1, n_heads=2, n_kv_heads=1, mlps=True, parallel=False)
    >>> graph.senders
    ('embedding', 'L0H0', 'L0H1', 'L0 MLP')
    >>> graph.receivers
    ('L0H0 q', 'L0H1 q', 'L0KV0 k', 'L0KV0 v', 'L0 MLP', 'logits')
    >>> graph.exists[1].tolist()                        # L0H0 is read by the MLP and the logits
    [False, False, False, False, True, True]
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlps: bool
    parallel: bool  # whether attention and MLP of a layer read the same stream

    @cached_property
    def senders(self) -> tuple[str, ...]:
        """The nodes that write, in the order in which they run."""
        mlp = ("{} MLP",) if self.mlps else ()
        names = (*(f"{{}}H{head}" for head in range(self.n_heads)), *mlp)
        return (EMBEDDING, *(name.format(f"L{layer}") for layer in range(self.n_layers) for name in names))

    @cached_property
    def receivers(self) -> tuple[str, ...]:
        """The inputs that read the stream, in the order in which they run."""
        kv = "H" if self.n_kv_heads == self.n_heads else "KV"
        names = [f"{{}}H{head} q" for head in range(self.n_heads)]
        names += [f"{{}}{kv}{head} {at}" for at in INPUTS[1:] for head in range(self.n_kv_heads)]
        names += ["{} MLP"] if self.mlps else []
        return (*(name.format(f"L{layer}") for layer in range(self.n_layers) for name in names), LOGITS)

    def senders_of(self, layer: int) -> slice:
        """The places of a layer's senders: its heads, then its MLP."""
        count = self.n_heads + self.mlps
        return slice(1 + layer * count, 1 + (layer + 1) * count)

    def receivers_of(self, layer: int) -> slice:
        """The places of a layer's receivers: q, k and v head by head, then its MLP."""
        count = self.n_heads + 2 * self.n_kv_heads + self.mlps
        return slice(layer * count, (layer + 1) * count)

    @cached_property
    def exists(self) -> Bool[Tensor, "sender receiver"]:
        there = torch.zeros(len(self.senders), len(self.receivers), dtype=torch.bool)
        there[:, -1] = True
        for layer in range(self.n_layers):
            mine, read = self.senders_of(layer), self.receivers_of(layer)
            there[: mine.start, read] = True
            if self.mlps and not self.parallel:
                there[mine.start : mine.stop - 1, read.stop - 1] = True
        return there

    @cached_property
    def edges(self) -> Int[Tensor, "edge 2"]:
        """The places of sender and receiver of every edge, receiver by receiver."""
        return self.exists.T.nonzero().flip(dims=(1,))

    def nodes_of(self, receiver: str) -> tuple[str, ...]:
        """The nodes that an input belongs to: several heads for k and v of a kv head, none for the logits.

        >>> Graph(n_layers=1, n_heads=4, n_kv_heads=2, mlps=True, parallel=False).nodes_of("L0KV1 k")
        ('L0H2', 'L0H3')
        """
        node, _, at = receiver.rpartition(" ")
        if receiver == LOGITS:
            return ()
        if at == "MLP":
            return (receiver,)
        if "KV" not in node:
            return (node,)
        layer, _, number = node.partition("KV")
        shared = self.n_heads // self.n_kv_heads
        return tuple(f"{layer}H{head}" for head in range(int(number) * shared, (int(number) + 1) * shared))

    @cached_property
    def names(self) -> tuple[tuple[str, str], ...]:
        """(sender, receiver) of each edge, such as ("L0H3", "L2H1 k")."""
        return tuple((self.senders[sender], self.receivers[receiver]) for sender, receiver in self.edges.tolist())

    @cached_property
    def _into(self) -> dict[str, list[int]]:
        """The places of the edges into the inputs of each node, and into the logits."""
        into: dict[str, list[int]] = {}
        for place, (_, receiver) in enumerate(self.names):
            for node in self.nodes_of(receiver) or (LOGITS,):
                into.setdefault(node, []).append(place)
        return into

    def greedy(self, values: Sequence[float], count: int) -> list[int]:
        """The places of `count` edges, chosen one by one: the largest whose receiver is the logits, or belongs to a
        node from which an edge was chosen before.

        So every node chosen has a path to the logits. Fewer if no further edge can be connected.
        """
        heap: list[tuple[float, int]] = []
        chosen: list[int] = []
        taken: set[int] = set()
        reached: set[str] = set()

        def reach(node: str) -> None:
            if node not in reached:
                reached.add(node)
                for place in self._into.get(node, ()):
                    heappush(heap, (-abs(values[place]), place))

        reach(LOGITS)
        while heap and len(chosen) < count:
            _, place = heappop(heap)
            if place not in taken:
                taken.add(place)
                chosen.append(place)
                reach(self.names[place][0])
        return chosen
