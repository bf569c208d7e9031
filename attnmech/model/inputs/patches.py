"""Finds the patch of each position of the stream, by changing a line of the input and observing what changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import UnsupportedModelError
from ...maths.float64 import as_float64
from ..structure.signals import FrontEnd, Signal

_OneInput: TypeAlias = Callable[[Float[Tensor, "batch ..."]], Float[Tensor, "batch position d_model"]]
"""Computes the input of the first block from images or spectrograms."""

_CHANGE: Final = 4.0  # added to a line of the input: larger than any normalised pixel, to show in 16 bits

_AT_MOST: Final = 0.05  # changes up to this share of a position's largest entry are rounding: about 6 of bfloat16

_AT_ONCE: Final = 16  # the number of changed inputs in one batch


@dataclass(frozen=True)
class Lines:
    """The windows along one axis of an input, one for each row (or column) of patches."""

    axis: int  # the axis of the input, not counting the batch axis
    length: int
    window: int
    step: int

    @property
    def count(self) -> int:
        return (self.length - self.window) // self.step + 1

    def showing(self, number: int) -> range:
        """The numbers of the windows that contain the first line of window `number`."""
        return range(max(0, number - (self.window - 1) // self.step), number + 1)


def patch_places(
    front: FrontEnd, signal: Signal, like: Tensor, rows: Lines, columns: Lines
) -> list[tuple[int, int] | None]:
    """The row and column of each position's patch; None for a position that no line of the input changes.

    Raises `UnsupportedModelError` if a position does not hold exactly one patch.
    """
    sample = signal.noise(1, 0, like)[signal.argument]
    windows = [_windows(lambda x: front({signal.argument: x}), sample, lines) for lines in (rows, columns)]
    places: list[tuple[int, int] | None] = []
    for row, column in zip(*windows, strict=True):
        if (row is None) != (column is None):
            raise _mismatched("the input of its first block at one position does not come from a single patch")
        places.append(None if row is None or column is None else (row, column))
    held = [place for place in places if place is not None]
    if sorted(held) != [(row, column) for row in range(rows.count) for column in range(columns.count)]:
        raise _mismatched("its patches do not each enter the first block at a separate position")
    return places


def _mismatched(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"its positions cannot be matched with patches: {reason}.")


def _windows(front: _OneInput, sample: Tensor, lines: Lines) -> list[int | None]:
    """The number of the window that each position holds; None for a position that no line changes."""
    changes = []
    for start in range(0, lines.count, _AT_ONCE):
        changes.append(_changed(front, sample, lines, range(start, min(start + _AT_ONCE, lines.count))))
    changed = torch.cat(changes)
    windows: list[int | None] = []
    for shows in changed.T:
        seen = shows.nonzero().flatten().tolist()
        windows.append(seen[0] if seen else None)
        if seen and seen != [number for number in range(lines.count) if seen[0] in lines.showing(number)]:
            raise _mismatched("the input of its first block at one position does not come from a single patch")
    return windows


def _changed(front: _OneInput, sample: Tensor, lines: Lines, numbers: range) -> Bool[Tensor, "line position"]:
    """For each of some windows, the positions that change with its first line."""
    batch = sample.expand(len(numbers) + 1, *sample.shape[1:]).clone()
    for place, number in enumerate(numbers):
        where: list[Any] = [place, *[slice(None)] * (sample.ndim - 1)]
        where[1 + lines.axis] = number * lines.step
        batch[tuple(where)] += _CHANGE
    stream = as_float64(front(batch))
    before, after = stream[-1:], stream[:-1]
    # The same image gives slightly different numbers alone and in a batch, by rounding.
    rounding = min(1e3 * torch.finfo(sample.dtype).eps, _AT_MOST)
    return (after - before).abs().amax(dim=-1) > rounding * before.abs().amax(dim=-1)
