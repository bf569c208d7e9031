"""Makes one `Batch` from pixels: its positions are the patches, the class token and registers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from ...basics.arguments import dense, shown
from ...basics.messages import first_line
from ...basics.public import public
from ...batch import Batch
from ...errors import InputError
from ..structure.signals import FrontEnd, Signal, pair
from .patches import Lines, patch_places
from .processors import Prepared

_ROW: Final = 2**16  # larger than any row of patches: in images of another size, a patch has the id row · _ROW + column


@public
@dataclass(frozen=True)
class PatchGrid:
    """How an image is cut into patches."""

    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]

    @classmethod
    def of(cls, config: Any) -> "PatchGrid":
        """Reads the grid from a vision model's config."""
        return cls(getattr(config, "num_channels", 3), pair(config.image_size), pair(config.patch_size))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.channels, *self.image

    @property
    def labels(self) -> tuple[str, ...]:
        """The class token, then each patch as "row,column", from the top left."""
        rows, columns = self.size
        return ("[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns)))

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    def lines(self) -> tuple[Lines, Lines]:
        """The windows of the image in each row, and in each column, of patches."""
        (height, width), (tall, wide) = self.image, self.patch
        return Lines(1, height, tall, tall), Lines(2, width, wide, wide)


def names_of(config: Any, count: int) -> tuple[str, ...]:
    """The names of the positions that are not patches, in order."""
    classes = getattr(config, "n_cls_tokens", 1)
    first = ["[CLS]"] if classes == 1 else [f"[CLS] {number + 1}" for number in range(classes)]
    distilled = ["[DIST]"] if config.model_type in ("deit", "audio-spectrogram-transformer") else []
    registers = [f"register {number + 1}" for number in range(getattr(config, "num_register_tokens", 0))]
    detections = [f"detection {number + 1}" for number in range(getattr(config, "num_detection_tokens", 0))]
    for named in ([*first, *distilled, *registers, *detections], [*registers, *detections]):
        if len(named) == count:
            return tuple(named)
    return tuple(f"token {number + 1}" for number in range(count))


class ImageEncoder:
    """Turns images into a batch for one model."""

    special: Final[frozenset[int]] = frozenset()  # empty, since patches are not special tokens of a tokenizer

    def __init__(
        self,
        signal: Signal,
        grid: PatchGrid,
        front: FrontEnd,
        config: Any,
        *,
        interpolates: bool,
        like: Tensor,
        processor: Any,
    ) -> None:
        self.grid, self.signal, self._front, self._interpolates = grid, signal, front, interpolates
        self.device, self.dtype = like.device, like.dtype
        self._prepare = Prepared(processor, "pixels", signal.argument, grid.channels)
        self._places = patch_places(front, signal, like, *grid.lines())
        self._names = names_of(config, sum(place is None for place in self._places))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The positions of an image of the model's own size."""
        names = iter(self._names)
        return tuple(next(names) if place is None else f"{place[0]},{place[1]}" for place in self._places)

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        return tuple(map(self._text, ids))

    def _text(self, number: int) -> str:
        if number < len(self.labels):
            return self.labels[number]
        row, column = divmod(number - len(self.labels), _ROW)
        return f"{row},{column}"

    def encode(self, inputs: Any, bos: bool | None = None) -> Batch:
        """One batch from pixel values `[batch channel height width]`, one image `[channel height width]`, or a mapping.

        Pixel values must be as the model expects them, already scaled and normalised. Pictures (a Pillow image, a
        `Path`, or an array [height width 3] of bytes), and lists of them, go through the model's own processor.
        """
        if bos is not None:
            raise InputError("bos is only for texts; this model reads images. Leave it out.")
        other_size = False
        if isinstance(inputs, Mapping):
            named = dict(inputs)
            other_size = bool(named.pop("interpolate_pos_encoding", False)) and self._interpolates
            if set(named) != {"pixel_values"}:
                names = sorted(map(str, inputs))
                raise InputError(f'a mapping of inputs for this model must hold only "pixel_values"; got {names}.')
            inputs = named["pixel_values"]
        elif not isinstance(inputs, Tensor):
            inputs = self._prepare(inputs)[self.signal.argument].flatten(0, -4)  # tiles are images
        if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
            got = str(inputs.dtype) if isinstance(inputs, torch.Tensor) else shown(inputs)
            raise InputError(
                "this model reads images: give a floating-point tensor of pixel values, [batch channel height width]; "
                f"got {got}."
            )
        dense("pixel values", inputs)
        pixels = inputs[None] if inputs.ndim == 3 else inputs
        fits = pixels.ndim == 4 and len(pixels) > 0 and pixels.shape[1] == self.grid.channels
        if not fits or (tuple(pixels.shape[1:]) != self.grid.shape and self._interpolates and not other_size):
            raise self._misfit(inputs)
        return self._batch(pixels.to(device=self.device, dtype=self.dtype))

    def _misfit(self, inputs: Tensor, reason: str = "") -> InputError:
        other = '; other sizes with {"pixel_values": ..., "interpolate_pos_encoding": True}' * self._interpolates
        return InputError(
            f"pixel values must have the shape [batch, {', '.join(map(str, self.grid.shape))}] (channels, height, "
            f"width of this model{other}); got {tuple(inputs.shape)}{reason}. Resize the image as the model's "
            "processor does."
        )

    def _batch(self, pixels: Tensor) -> Batch:
        ids = torch.arange(len(self.labels), device=self.device)
        if tuple(pixels.shape[1:]) != self.grid.shape:
            ids = self._other_size(pixels)
        ids = ids.expand(len(pixels), -1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        labels = self.position_texts(ids[0].tolist())
        pieces = (("",) * len(labels),) * len(pixels)
        return Batch(ids, mask, (labels,) * len(pixels), None, extra={self.signal.argument: pixels}, pieces=pieces)

    def _other_size(self, pixels: Tensor) -> Tensor:
        """The positions of images of another size: the number of patches differs, the other positions are the same."""
        grid = PatchGrid(self.grid.channels, (int(pixels.shape[2]), int(pixels.shape[3])), self.grid.patch)
        options = {"interpolate_pos_encoding": True} if self._interpolates else {}
        try:
            length = self._front({self.signal.argument: pixels[:1], **options}).shape[1]
        except Exception as error:  # models raise many kinds of errors for a wrong size
            raise self._misfit(pixels, f" ({first_line(error)})") from error
        first = next((place for place, patch in enumerate(self._places) if patch is not None), 0)
        others = [place for place, patch in enumerate(self._places) if patch is None]
        rows, columns = grid.size
        if length != len(others) + rows * columns:
            raise self._misfit(pixels, f"; the model turns them into {length} positions")
        patches = [len(self.labels) + row * _ROW + column for row in range(rows) for column in range(columns)]
        return torch.tensor([*others[:first], *patches, *others[first:]], device=self.device)
