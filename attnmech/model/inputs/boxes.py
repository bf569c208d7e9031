"""Finds where in the user's pictures the entries of a model's pixels lie, whatever its processor does to pictures.

Pictures of the same sizes go through the processor: black, white, and three whose grey is the fraction from the left,
the fraction from the top, and the number of the picture. (grey - black) / (white - black) at an entry is its
coordinate, since resizing, cropping, padding, tiling and normalisation are linear in the colours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .held import Part
from .processors import Pictures

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of a picture's width and height."""

_MOST: Final = 100  # the largest number of pictures whose greys differ by enough
_CONTRAST: Final = 0.1  # black and white change an entry by at least this share of the largest change

_STEP: Final = 1 / 255  # the difference between neighbouring greys


def coordinates(pictures: Pictures, inputs: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "coordinate ..."]]:
    """For each of the model's inputs with pixels, at each entry: the fraction of the picture's width at its left, the
    fraction of the height above it, and the number of the picture, from 1. NaN at entries outside all pictures.

    Empty if the processor makes inputs of other shapes from other colours.
    """
    if not 0 < len(pictures.sizes) <= _MOST:
        return {}
    made = [
        pictures.processed([_image(size, shade, number) for number, size in enumerate(pictures.sizes, 1)])
        for shade in _SHADES
    ]
    fields = {}
    for name, own in inputs.items():
        values = [torch.as_tensor(of_shade[name]).cpu() for of_shade in made if name in of_shade]
        if not values:
            continue
        if len(values) != len(made) or any(value.shape != own.shape for value in values):
            return {}
        if own.is_floating_point():
            black, white, *greys = (value.float() for value in values)
            reach = white - black
            reach[reach.abs() < _CONTRAST * reach.abs().max()] = torch.nan
            fields[name] = torch.stack([(grey - black) / reach for grey in greys])
            fields[name][2] *= _MOST
        elif any(not torch.equal(value, own.cpu()) for value in values):
            return {}
    return fields


_SHADES: Final[Sequence[Callable[[np.ndarray, np.ndarray, int], np.ndarray]]] = (
    lambda across, down, number: 0 * across,
    lambda across, down, number: 0 * across + 1,
    lambda across, down, number: across,
    lambda across, down, number: down,
    lambda across, down, number: 0 * across + number / _MOST,
)
"""The brightness of a pixel, from its fractions of the width and height, and the number of its picture."""


def _image(size: tuple[int, int], shade: Callable[[np.ndarray, np.ndarray, int], np.ndarray], number: int) -> Any:
    from PIL import Image

    width, height = size
    down, across = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    grey = np.rint(255 * shade(across, down, number)).astype(np.uint8)
    return Image.fromarray(np.stack([grey] * 3, axis=-1))


def box_of(part: Part, field: Float[Tensor, "coordinate ..."]) -> Box | None:
    """The box of a part of an input; None if its pixels are of no picture, or do not fill a rectangle evenly.

    The sides of evenly spaced coordinates lie twice their mean distance from the middle: a mean is finer than the steps
    of one grey.
    """
    values = torch.stack([part.view(one)[part.where].flatten() for one in field[:2]])
    values = values[:, ~values.isnan().any(dim=0)]
    if values.shape[1] < 2:
        return None
    middle = values.mean(dim=1, keepdim=True)
    away = values - middle
    reach = 2 * away.abs().mean(dim=1)
    ends = torch.stack([-away.amin(dim=1), away.amax(dim=1)])
    even = ((ends <= 1.02 * reach + _STEP) & (1.25 * ends + _STEP >= reach)).all()
    if not bool(even) or abs(float((away[0] * away[1]).mean())) > 0.05 * float(reach.prod()):
        return None
    (left, top), (right, bottom) = (edge.clamp(0, 1).tolist() for edge in (middle[:, 0] - reach, middle[:, 0] + reach))
    return left, top, right, bottom


def grid_of(boxes: Sequence[Box | None]) -> list[tuple[int, int]] | None:
    """The row and column of each box, from 1, if the boxes fill a grid, one in each cell; None otherwise.

    >>> grid_of([(0.5, 0.0, 1.0, 1.0), (0.0, 0.0, 0.5, 1.0)])
    [(1, 2), (1, 1)]
    """
    ends = np.array([box for box in boxes if box is not None])
    if not len(boxes) == len(ends) > 0:
        return None
    lines = []
    for side in (1, 0):
        middles, widths = ends[:, [side, side + 2]].mean(axis=1), ends[:, side + 2] - ends[:, side]
        # A new row or column begins where the middle moves on by half a width.
        order = middles.argsort()
        starts = np.diff(middles[order], prepend=-1) > widths.min() / 2
        lines.append(starts.cumsum()[order.argsort()].tolist())
    cells = list(zip(*lines, strict=True))
    return cells if len(set(cells)) == len(cells) == max(lines[0]) * max(lines[1]) else None
