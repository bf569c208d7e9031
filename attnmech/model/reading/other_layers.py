"""Names the layers of a hybrid without attention, and what they have instead."""

from itertools import groupby

from torch import nn

from ..stack.stack import Stack


def other_layers(stack: Stack) -> dict[int, str]:
    """The layers without attention, each with the kind of module that replaces it (GatedDeltaNet, MambaMixer).

    These modules belong to a class that no block with attention contains; the class gives their name.
    """
    known = {type(part) for block in stack.blocks.values() for part in block.children()}
    family = stack.architecture.name
    return {
        place: _kind([part for part in block.children() if type(part) not in known] or [block], family)
        for place, block in enumerate(stack.places)
        if place not in stack.blocks
    }


def about_other_layers(stack: Stack) -> str:
    """A sentence that names the layers without attention; empty if every layer has attention."""
    by_kind: dict[str, list[int]] = {}
    for layer, kind in other_layers(stack).items():
        by_kind.setdefault(kind, []).append(layer)
    if not by_kind:
        return ""
    named = "; ".join(f"{_ranges(layers)} ({kind})" for kind, layers in by_kind.items())
    return f"layers without attention, and so without heads: {named}"


def _kind(parts: list[nn.Module], family: str) -> str:
    """The class of the first module that is neither a norm nor an MLP (an MLP only if there is nothing else)."""
    names = [type(part).__name__ for part in parts]
    first = [name for name in names if not any(word in name.lower() for word in ("norm", "mlp", "moe", "feedforward"))]
    name = next(iter([*first, *(name for name in names if "norm" not in name.lower()), *names]))
    return name.removeprefix(family) or name


def _ranges(layers: list[int]) -> str:
    """Layers in a sentence: "0-2, 4"."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
