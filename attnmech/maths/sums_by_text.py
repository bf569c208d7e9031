"""Sums over rows by text and by class of row: statistics in float64, and counts of the rows that define them."""

from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .blocks import block_bytes
from .float64 import as_float64, float64_device

_AT_ONCE: Final = 2**18  # about as many values are summed at a time, so that float64 copies stay in the cache


def by_class(
    real: Bool[Tensor, "batch position"], special: Bool[Tensor, "batch position"], first: Bool[Tensor, "batch position"]
) -> Bool[Tensor, "batch class position"]:
    """The real rows in classes: those of ordinary tokens, of special tokens, and of each text's first token."""
    return torch.stack([~special & ~first, special & ~first, first], dim=1) & real[:, None]


def sums_by_text(
    values: Float[Tensor, "statistic *layers head batch query"], classes: Bool[Tensor, "batch class query"]
) -> Float[Tensor, "statistic class *layers head batch"]:
    """Sums values over the rows of each class in each text; `values` are 0 where a statistic is not defined.

    >>> sums_by_text(torch.tensor([[[[1.0, 2.0, 4.0]]]]), torch.tensor([[[True, False, True]]])).item()
    5.0
    """
    device = float64_device(values.device)
    return _sums(values.to(device), classes.to(device), torch.float64)


def counts_by_text(
    valid: Bool[Tensor, "statistic *layers head batch query"], classes: Bool[Tensor, "batch class query"]
) -> Float[Tensor, "statistic class *layers head batch"]:
    """Counts the rows of each class in each text on which a statistic is defined.

    >>> counts_by_text(torch.tensor([[[[True, True, False]]]]), torch.tensor([[[True, False, True]]])).item()
    1.0
    """
    # As bytes: torch sums Booleans more slowly.
    return as_float64(_sums(valid.view(torch.uint8), classes, torch.int32))


def _sums(values: Tensor, classes: Bool[Tensor, "batch class query"], precision: torch.dtype) -> Tensor:
    if values.device.type == "cpu":
        return torch.stack([_sums_of(values, members, precision) for members in classes.unbind(dim=1)], dim=1)
    # Finding the rows of a class would make the CPU wait for the device.
    members = classes.transpose(0, 1)[(slice(None), *(None,) * (values.ndim - 3))]
    at_once = max(1, block_bytes(values.device) * len(values) // max(1, values.nbytes * len(members)))
    sums = [
        torch.where(members, some[:, None], 0).sum(dim=-1, dtype=precision) for some in torch.split(values, at_once)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _sums_of(values: Tensor, members: Bool[Tensor, "batch query"], precision: torch.dtype) -> Tensor:
    places = members.any(dim=0).nonzero()[:, 0]
    if not len(places):
        return values.new_zeros(values.shape[:-1], dtype=precision)
    first, last = int(places[0]), int(places[-1])
    rows = slice(first, last + 1) if last + 1 - first == len(places) else places
    here = members[:, rows]
    all_count = bool(here.all())
    axes = values.shape[:-3]
    values = values.flatten(0, -4)
    at_once = max(1, _AT_ONCE * len(values) // max(1, values.numel()))
    sums = []
    for some in torch.split(values, at_once):
        value = some[..., rows]
        sums.append((value if all_count else value.masked_fill(~here, 0)).sum(dim=-1, dtype=precision))
    together = torch.cat(sums)
    return together.view(*axes, *together.shape[1:])
