"""Arranges numbers by layer: in tensors with a row for every layer of the model, in tables, and in differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..basics.arguments import member
from ..basics.fields import check_layers
from ..errors import InputError
from .result import PagedResult


class OfLayers(PagedResult):
    """A result for some of a model's `n_layers` layers."""

    layers: tuple[int, ...]
    n_layers: int

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, self.n_layers)

    def _by_layer(self, measured: Tensor) -> Tensor:
        """Expands numbers `[measured ...]` of the layers measured to all layers of the model, NaN at the others."""
        return by_layer(measured, self.layers, self.n_layers)

    def _place_of(self, layer: object) -> int:
        """The place of a layer among the layers measured."""
        return self.layers.index(member("layer", layer, self.layers, "the layers measured"))


def table_of(axes: Mapping[str, Sequence[Any]], columns: Mapping[str, Tensor]) -> pd.DataFrame:
    """A table with one row for each place of tensors, from the labels of their axes.

    >>> table_of({"layer": [3], "head": range(2)}, {"share": torch.tensor([[0.5, 0.25]])}).to_dict("list")
    {'layer': [3, 3], 'head': [0, 1], 'share': [0.5, 0.25]}
    """
    shape = [len(labels) for labels in axes.values()]
    rows = pd.MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    numbers = {name: value.expand(shape).flatten().tolist() for name, value in columns.items()}
    return pd.concat([rows, pd.DataFrame(numbers, index=rows.index)], axis=1)


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
