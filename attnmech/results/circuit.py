"""The circuit: a set of nodes and edges of a model's residual graph, as a value."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
import xxhash
from jaxtyping import Bool
from torch import Tensor

from ..basics.arguments import listed, shown
from ..basics.files import path_ending, path_of, writing
from ..basics.public import public
from ..errors import InputError
from .graph import EMBEDDING, LOGITS, Graph, head_of

Edge = tuple[str, str]  # (sender, receiver), such as ("L0H3", "L2H1 k")

_NODE: Final = re.compile(rf"{EMBEDDING}|L\d+H\d+|L\d+ MLP")
_RECEIVER: Final = re.compile(rf"L\d+H\d+ [qkv]|L\d+KV\d+ [kv]|L\d+ MLP|{LOGITS}")


@public
@dataclass(frozen=True)
class Circuit:
    """A set of nodes, or of edges, of a model's residual graph.

    >>> one = Circuit(edges=[("embedding", "L0H3 v"), ("L0H3", "L2H1 k"), ("L2H1", "logits")])
    >>> one.heads, len(one)
    ([(0, 3), (2, 1)], 3)
    >>> print(one - Circuit(edges=[("embedding", "L0H3 v")]))
    Circuit of 2 edges: L0H3 → L2H1 k, L2H1 → logits
    >>> Circuit(nodes=["L0H3", "L2 MLP"]) | Circuit(nodes=["L2H1"])
    Circuit of 3 nodes: L0H3, L2H1, L2 MLP

    Nodes are named "L2H1" and "L2 MLP". An edge goes from a node, or from "embedding", to an input: "L2H1 q" (k and v
    of heads that share them belong to a kv head, "L2KV0 k"), "L2 MLP", or "logits". A circuit of nodes stands for all
    edges between its nodes, the embedding and the logits.

    Circuits of the same kind can be combined (`|`, `&`, `-`), compared, saved and loaded.
    """

    nodes: tuple[str, ...] = ()
    """The nodes, sorted: those given or, in a circuit of edges, the heads and MLPs from which edges go, or to which."""
    edges: tuple[Edge, ...] | None = None
    """The edges, sorted; None for a circuit of nodes."""

    def __post_init__(self) -> None:
        if self.edges is not None:
            if self.nodes != () and set(self.nodes) != _ends(self.edges):
                raise InputError("give the nodes of a circuit or its edges, not both: edges name their nodes.")
            edges = {_checked_edge(edge) for edge in listed("edges", self.edges, "a list of (sender, receiver)")}
            object.__setattr__(self, "edges", tuple(sorted(edges, key=lambda edge: (_order(edge[1]), _order(edge[0])))))
            nodes: Iterable[str] = _ends(edges)
        else:
            nodes = listed("nodes", self.nodes, 'a list such as ["L0H3", "L2 MLP"]')
            for node in nodes:
                if not isinstance(node, str) or not _NODE.fullmatch(node) or node == EMBEDDING:
                    raise InputError(f'a node is named as "L2H1" or "L2 MLP"; got {shown(node)}.')
        object.__setattr__(self, "nodes", tuple(sorted(set(nodes), key=_order)))

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The heads, as (layer, head): what `am.confirm_heads` and `am.ablate_set` take."""
        return [head for head in map(head_of, self.nodes) if head]

    def __len__(self) -> int:
        return len(self.nodes) if self.edges is None else len(self.edges)

    def __or__(self, other: Any) -> Self:
        return self._of(self._items | self._like(other))

    def __and__(self, other: Any) -> Self:
        return self._of(self._items & self._like(other))

    def __sub__(self, other: Any) -> Self:
        return self._of(self._items - self._like(other))

    def save(self, path: str | Path) -> Path:
        """Writes the circuit as JSON, `{"nodes": [...]}` or `{"edges": [[sender, receiver], ...]}`, with a digest."""
        target = path_ending(path, ".json")
        content: dict[str, Any] = {"nodes": self.nodes} if self.edges is None else {"edges": self.edges}
        with writing(target) as draft:
            draft.write_text(json.dumps({**content, "digest": _digest_of(content)}, indent=1) + "\n")
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a circuit that `save` wrote, or a file by hand without a digest; raises `InputError` for any other
        file.
        """
        source = path_of(path)
        try:
            content = json.loads(source.read_text())
            if "digest" in content and content.pop("digest") != _digest_of(content):
                raise ValueError("its content does not match its digest; if it was edited, remove the digest")
            ((kind, items),) = content.items()
            if kind not in ("nodes", "edges"):
                raise ValueError(kind)
            return cls(edges=[tuple(edge) for edge in items]) if kind == "edges" else cls(nodes=items)  # type: ignore[arg-type]
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InputError(f"{source} is not a valid file of a circuit: {error}.") from error

    def mask(self, graph: Graph) -> Bool[Tensor, "sender receiver"]:
        """Which edges of a graph belong to the circuit; raises `InputError` for nodes and edges that it lacks."""
        kept = torch.zeros_like(graph.exists)
        senders, receivers = (
            {name: place for place, name in enumerate(names)} for names in (graph.senders, graph.receivers)
        )
        if self.edges is None:
            for node in self.nodes:
                if node not in senders:
                    raise InputError(f"the model has no node {node!r}; its last one is {graph.senders[-1]!r}.")
            mine = {EMBEDDING, *self.nodes}
            reads = torch.tensor(
                [name == LOGITS or not mine.isdisjoint(graph.nodes_of(name)) for name in graph.receivers]
            )
            return graph.exists & torch.tensor([name in mine for name in graph.senders])[:, None] & reads
        for sender, receiver in self.edges:
            place = senders.get(sender), receivers.get(receiver)
            if None in place or not graph.exists[place]:
                raise InputError(
                    f"the model has no edge {sender} → {receiver}: senders are read by later layers, and by the MLP of "
                    "their own layer if it follows attention; heads that share keys and values receive k and v by kv "
                    'head, such as "L2KV0 k".'
                )
            kept[place] = True
        return kept

    @property
    def _items(self) -> set[Any]:
        return set(self.nodes if self.edges is None else self.edges)

    def _like(self, other: Any) -> set[Any]:
        if not isinstance(other, Circuit) or (self.edges is None) != (other.edges is None):
            kind = "nodes" if self.edges is None else "edges"
            raise InputError(f"a circuit of {kind} can be combined with another circuit of {kind}; got {shown(other)}.")
        return other._items

    def _of(self, items: set[Any]) -> Self:
        return type(self)(nodes=tuple(items)) if self.edges is None else type(self)(edges=tuple(items))

    def __repr__(self) -> str:
        if self.edges is None:
            return f"Circuit of {len(self)} node{'s' * (len(self) != 1)}: {', '.join(self.nodes)}"
        edges = ", ".join(f"{sender} → {receiver}" for sender, receiver in self.edges)
        return f"Circuit of {len(self)} edge{'s' * (len(self) != 1)}: {edges}"


def _digest_of(content: Mapping[str, Any]) -> str:
    """The XXH3 (128 bits) of the JSON of a circuit, whatever the layout of its file."""
    return xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()


def _ends(edges: Iterable[Edge]) -> set[str]:
    """The heads and MLPs at the ends of edges; kv heads, whose queries belong to several heads, only receive."""
    names = {sender for sender, _ in edges} | {
        receiver if receiver.endswith("MLP") else receiver.rpartition(" ")[0] for _, receiver in edges
    }
    return {name for name in names if re.fullmatch(r"L\d+( MLP|H\d+)", name)}


def _checked_edge(edge: Any) -> Edge:
    ends = listed("an edge", edge, '(sender, receiver), such as ("L0H3", "L2H1 k")')
    if len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise InputError(f'an edge is (sender, receiver), such as ("L0H3", "L2H1 k"); got {shown(edge)}.')
    sender, receiver = ends
    if not _NODE.fullmatch(sender) or not _RECEIVER.fullmatch(receiver):
        raise InputError(
            f'an edge goes from "embedding", "L0H3" or "L0 MLP" to "L2H1 q", "L2KV0 k", "L2 MLP" or "logits"; got '
            f"{shown(edge)}."
        )
    return sender, receiver


def _order(name: str) -> tuple[int, int, int, str]:
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    if not numbers:
        return (-1 if name == EMBEDDING else 10**9, 0, 0, name)
    return numbers[0], int("MLP" in name), numbers[1] if len(numbers) > 1 else 0, name
