"""How do pixels become one `Batch` whose positions are the class token and the patches?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..arguments import dense
from ..batch import Batch
from ..errors import InputError


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


@dataclass(frozen=True)
class PatchGrid:
    """How an image is cut into patches."""

    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]

    @classmethod
    def of(cls, config: Any) -> "PatchGrid":
        """From a vision model's config."""
        return cls(int(config.num_channels), _pair(config.image_size), _pair(config.patch_size))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.channels, *self.image

    @property
    def labels(self) -> tuple[str, ...]:
        """The class token, then each patch as "row,column", from the top left."""
        rows, columns = (side // step for side, step in zip(self.image, self.patch, strict=True))
        return ("[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns)))


class ImageEncoder:
    """Turns pixel values into a batch for one model."""

    special: Final[frozenset[int]] = frozenset()
    """Patches are not a tokenizer's special tokens."""

    def __init__(self, grid: PatchGrid, device: torch.device, dtype: torch.dtype) -> None:
        self.grid, self.device, self.dtype = grid, device, dtype

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """The patches with these numbers."""
        return tuple(self.grid.labels[each] for each in ids)

    def encode(self, inputs: Any, bos: bool | None = None) -> Batch:
        """One batch from `[batch channel height width]`, one image `[channel height width]`, or a mapping.

        Pixel values are taken as the model expects them: already scaled and normalised.
        """
        if bos is not None:
            raise InputError("bos is only for texts; this model reads images. Leave it out.")
        if isinstance(inputs, Mapping):
            if set(inputs) != {"pixel_values"}:
                names = sorted(map(str, inputs))
                raise InputError(f'a mapping of inputs for this model must hold only "pixel_values"; got {names}.')
            inputs = inputs["pixel_values"]
        if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
            got = str(inputs.dtype) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            raise InputError(
                "this model reads images: give a floating-point tensor of pixel values, [batch channel height width]; "
                f"got {got}."
            )
        dense("pixel values", inputs)
        pixels = inputs[None] if inputs.ndim == 3 else inputs
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != self.grid.shape or len(pixels) == 0:
            raise InputError(
                f"pixel values must have the shape [batch, {', '.join(map(str, self.grid.shape))}] (channels, height, "
                f"width of this model); got {tuple(inputs.shape)}. Resize the image as the model's processor does."
            )
        return self._batch(pixels)

    def _batch(self, pixels: Tensor) -> Batch:
        labels = self.grid.labels
        ids = torch.arange(len(labels), device=self.device).expand(len(pixels), -1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        given = {"pixel_values": pixels.to(device=self.device, dtype=self.dtype)}
        return Batch(ids, mask, (labels,) * len(pixels), None, extra=given)
