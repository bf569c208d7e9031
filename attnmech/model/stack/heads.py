"""Finds the heads that a selection names in a stack."""

from collections.abc import Iterable, Sequence

from ...basics.arguments import index_of
from ...errors import InputError
from ...interventions import Head, Heads, checked_heads
from .points import ModelPoints
from .stack import Stack


def selected_heads(
    points: ModelPoints, stack: Stack, heads: Heads, layers: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """The (layer, head) pairs of a selection, in order; raises `InputError` for a head that the stack does not have."""
    within = points.check_layers(layers, stack.label)
    named = checked_heads(heads)
    if named == "all":
        return [(layer, head) for layer in within for head in range(stack.n_heads)]
    require_heads(points, stack, named, within, "of each layer of this model")
    return sorted(named)


def require_heads(points: ModelPoints, stack: Stack, heads: Sequence[Head], within: Sequence[int], owner: str) -> None:
    """Raises `InputError` for a head that the stack does not have, or whose layer is not in `within`."""
    points.check_layers([layer for layer, _ in heads], stack.label)
    for _, head in heads:
        index_of("head", head, stack.n_heads, owner)
    for layer, _ in heads:
        if layer not in within:
            raise InputError(f"`heads` names layer {layer}, which is not in `layers`; give only one of the two.")
