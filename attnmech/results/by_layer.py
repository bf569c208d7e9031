"""Arranges numbers with one row for every layer of the model, and subtracts numbers text by text."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InputError


def subtracted(
    one: Float[Tensor, "*places text"], other: Float[Tensor, "*places other_text"], paired: bool
) -> Float[Tensor, "*places either_text"]:
    """Subtracts text by text if texts are paired; else returns the difference of the means as the only entry of `text`.

    In both cases, the mean over the axis `text` is the difference; a single entry has no interval.
    """
    return one - other if paired else one.nanmean(dim=-1, keepdim=True) - other.nanmean(dim=-1, keepdim=True)


def shared_layers(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The layers that two results have in common; raises `InputError` if there are none.

    >>> shared_layers((0, 2, 3), (3, 2))
    (2, 3)
    """
    layers = tuple(layer for layer in one if layer in other)
    if not layers:
        raise InputError(f"two results need layers in common to be subtracted; got {list(one)} and {list(other)}.")
    return layers


def by_layer(measured: Tensor, layers: Sequence[int], n_layers: int, axis: int = 0) -> Tensor:
    """Expands numbers for some layers to every layer of the model along an axis, with NaN at layers not measured.

    >>> by_layer(torch.tensor([0.5, 0.2]), [3, 1], 5)
    tensor([   nan, 0.2000,    nan, 0.5000,    nan])
    """
    shape = list(measured.shape)
    shape[axis] = n_layers
    places = torch.tensor(layers, dtype=torch.long, device=measured.device)
    return measured.new_full(shape, torch.nan).index_copy(axis, places, measured)
