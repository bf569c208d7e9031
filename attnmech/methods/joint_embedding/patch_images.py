"""The images of tokens that are patches, and the colour of each patch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from ...batch import Batch
from ...model.inputs.encoders import images_of
from ...model.run.hooked import HookedModel
from .token_pairs import Tokens

PICTURES: Final = 20  # the largest number of images that are stored as pictures


@dataclass(frozen=True)
class PatchImages:
    """The images whose patches are the tokens."""

    grid: tuple[int, int]  # rows and columns of patches
    pictures: Mapping[str, str]  # the first pictures by their number, as data URIs
    colours: Float[Tensor, "token 3"]  # the mean red, green and blue of each patch, 0 to 255; 0 for other tokens


def patch_images(model: HookedModel, batch: Batch, tokens: Tokens) -> PatchImages | None:
    """Returns the images of a batch of pixel values; None for texts.

    Pixel values are the model's normalised inputs; each image is shown from its lowest to its highest value.
    """
    images = images_of(model.encoder, batch)
    if images is None or model.grid is None:
        return None
    patch = model.grid.patch
    pixels = _coloured(images.float().cpu())
    means = torch.nn.functional.avg_pool2d(pixels, patch, stride=patch)
    # Patches are contiguous: after a class token and registers, or before detection tokens.
    before = next((place for place, label in enumerate(batch.tokens[0]) if "," in label), 0)
    colours = torch.zeros(len(pixels), batch.ids.shape[1], 3)
    colours[:, before : before + means[0, 0].numel()] = means.flatten(2).mT
    pictures = {str(number): data_uri(image) for number, image in enumerate(images[:PICTURES])}
    return PatchImages((means.shape[2], means.shape[3]), pictures, tokens.of_each(colours))


def _coloured(pixels: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch 3 height width"]:
    """Converts to red, green and blue from 0 to 255: the first three channels, or grey from the first channel."""
    channels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    low = channels.amin(dim=(1, 2, 3), keepdim=True)
    span = channels.amax(dim=(1, 2, 3), keepdim=True) - low
    return 255 * (channels - low) / span.clamp_min(torch.finfo(span.dtype).tiny)


def data_uri(image: Float[Tensor, "channel height width"]) -> str:
    """Encodes an image of pixel values as a data URI, from its lowest value to its highest."""
    from plotly import express  # type: ignore[import-untyped]

    picture = _coloured(image[None].float().cpu())[0].permute(1, 2, 0).round().to(torch.uint8).numpy()
    source: str = express.imshow(picture, binary_string=True).data[0].source
    return source
