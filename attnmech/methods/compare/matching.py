"""Matches the heads of two runs by their patterns on texts of the same lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, get_args, get_type_hints

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ...maths.divergence import between_heads
from ...model.run.hooked import HookedModel
from ...model.stack.stack import Stack

MOVED: Final = 0.5
"""A head counts as moved only if its divergence from the head that matches it is below this share of its divergence
from the head with the same number.
"""

_BESIDE: Final = (("layer", ("head", "place")), ("of_layer", ("of_head",)))
"""The axes of layers, each with the axis of heads that is permuted within it."""


def pattern_divergence(
    one: HookedModel, first: Sequence[Batch], other: HookedModel, second: Sequence[Batch], stack: Stack
) -> tuple[Float[Tensor, "layer head other_head"], Float[Tensor, "layer head position"]]:
    """Measures the divergence between any two heads of a layer of a stack in two runs, and by position between heads
    with the same number.

    Both are Jensen-Shannon divergences in nats. The first is the mean over the rows that see two or more keys. The
    second is the mean over texts at each position; NaN at positions where no text has a row that counts.

    Raises `InputError` if no row of these texts counts.
    """
    layers, heads = stack.layers, stack.n_heads
    longest = max(batch.queries(stack.label).ids.shape[1] for batch in first)
    sums = torch.zeros(len(layers), heads, heads, dtype=torch.float64)
    by_row = torch.zeros(len(layers), heads, longest, dtype=torch.float64)
    counts = torch.zeros(longest, dtype=torch.float64)
    for left, right in zip(first, second, strict=True):
        mask = left.queries(stack.label).mask.cpu() & (left.keys(stack.label).lengths > 1).cpu()[:, None]
        if stack.architecture.causal:
            mask[torch.arange(len(mask)), mask.int().argmax(dim=1)] = False
        rows = mask.shape[1]
        counts[:rows] += mask.sum(dim=0)
        for place, layer in enumerate(layers):
            patterns = [
                model.run(batch, points=[stack.point("pattern")], layers=[layer])[stack.point("pattern"), layer].cpu()
                for model, batch in ((one, left), (other, right))
            ]
            divergence = between_heads(*(pattern.transpose(1, 2) for pattern in patterns)).double()
            divergence = divergence.masked_fill(~mask[..., None, None], 0.0)
            sums[place] += divergence.sum(dim=(0, 1))
            by_row[place, :, :rows] += divergence.diagonal(dim1=-2, dim2=-1).sum(dim=0).T
    if not bool(counts.any()):
        raise InputError(
            "heads are compared on rows that see at least two keys, and these texts have one token each; pass "
            "longer texts."
        )
    return sums / counts.sum(), by_row / counts


def matched(divergence: Float[Tensor, "layer head other_head"]) -> Int[Tensor, "layer head"]:
    """Assigns to each head of the first run a head of the second run in the same layer, with the least total
    divergence.

    A head keeps its number unless its match has less than half the divergence of the head with that number (`MOVED`),
    so that rounding does not exchange heads that attend alike.

    >>> matched(torch.tensor([[[0.4, 0.0], [0.0, 0.4]], [[0.1, 0.09], [0.2, 0.0]]]).double()).tolist()
    [[1, 0], [0, 1]]
    """
    cost = divergence.clone()
    cost.diagonal(dim1=-2, dim2=-1).mul_(MOVED)
    return torch.stack([torch.from_numpy(linear_sum_assignment(of_layer.numpy())[1]) for of_layer in cost])


def reordered(result: Any, order: Mapping[int, Sequence[int]]) -> Any:
    """Reorders the heads of each layer of a result: head h of the copy is head `order[layer][h]` of the argument.

    Every tensor with axes of layers and heads in its annotation is reordered, including the tensors of a state.
    """
    hints = get_type_hints(type(result))
    layers = getattr(result, "layers", None)
    changed: dict[str, Any] = {}
    for field in fields(result):
        value = getattr(result, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = _moved(value, hints[field.name], order, layers)
        elif field.name == "state":
            kinds = type(result)._STATE
            changed["state"] = {
                name: _moved(x, kinds[name], order, layers) if name in kinds else x for name, x in value.items()
            }
    return replace(result, **changed)


def _moved(value: Tensor, hint: Any, order: Mapping[int, Sequence[int]], layers: Sequence[int] | None) -> Tensor:
    axes = next((kind.dim_str for kind in (hint, *get_args(hint)) if hasattr(kind, "dim_str")), "")
    names = [name.removeprefix("#") for name in axes.split()]
    for layer_axis, head_axes in _BESIDE:
        head_axis = next((name for name in head_axes if name in names), None)
        if layer_axis not in names or head_axis is None:
            continue
        at, of = names.index(layer_axis), names.index(head_axis)
        if value.shape[of] == 1:
            continue
        # An axis as long as the model has a row for every layer; a shorter one has rows for the layers measured.
        every = value.shape[at] > max(order)
        numbers = range(value.shape[at]) if every or layers is None else layers
        parts = [
            part.index_select(of - (of > at), torch.tensor(order[number])) if number in order else part
            for number, part in zip(numbers, value.unbind(at), strict=True)
        ]
        value = torch.stack(parts, dim=at)
    return value
