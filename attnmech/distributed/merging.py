"""Merges partial results in a binary tree over their places, so that any number of workers can share the work.

Leaves are numbered from 0. The neighbours 2k and 2k + 1 of one level are merged into result k of the next level. At
most log2(n) results therefore wait, besides those of unfinished leaves, and the order of all sums depends neither on
the number of workers nor on when each finishes.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Node: TypeAlias = tuple[int, int]
"""A level and a place in it: the result covers 2^level leaves, from leaf place · 2^level on."""


@dataclass
class Tree:
    """The results that have not been merged further.

    >>> tree = Tree()
    >>> tree.add((0, 1), "b"), tree.add((0, 0), "a")
    (None, ((0, 0), (0, 1)))
    >>> tree.become((1, 0), "ab"), tree.add((0, 2), "c"), tree.prefix()
    (None, None, ['ab', 'c'])
    """

    held: dict[Node, Any] = field(default_factory=dict)
    start: int = 0
    """The first leaf whose result has not been taken."""

    def add(self, node: Node, value: Any) -> tuple[Node, Node] | None:
        """Stores a result; returns the pair that it completes, which can then be merged."""
        level, place = node
        self.held[node] = value
        sibling = (level, place ^ 1)
        return (min(node, sibling), max(node, sibling)) if sibling in self.held else None

    def become(self, node: Node, value: Any) -> tuple[Node, Node] | None:
        """Replaces a pair by its merged result; does nothing if the pair has been taken in the meantime."""
        level, place = node
        pair = [(level - 1, 2 * place), (level - 1, 2 * place + 1)]
        if not all(half in self.held for half in pair):
            return None
        for half in pair:
            del self.held[half]
        return self.add(node, value)

    def prefix(self) -> list[Any]:
        """The results, in order, that cover the leaves from `start` without a gap."""
        return [self.held[node] for node in self._prefix()]

    def take(self) -> list[Any]:
        """Removes the results of `prefix`, and returns them."""
        nodes = self._prefix()
        for level, place in nodes:
            self.start = (place + 1) << level
        return [self.held.pop(node) for node in nodes]

    def _prefix(self) -> list[Node]:
        first = {place << level: (level, place) for level, place in sorted(self.held)}
        nodes, at = [], self.start
        while at in first:
            level, place = first[at]
            nodes.append((level, place))
            at = (place + 1) << level
        return nodes
