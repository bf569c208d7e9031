"""Chooses the encoder that makes a model's batches."""

from itertools import compress
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ...batch import Batch
from ..own.module import OwnModule
from ..parts.pieces import Tokenized
from ..structure.architecture import Architecture
from ..structure.signals import FrontEnd, signal_config, signal_of, takes_other_sizes
from .encoder import Encoder
from .images import ImageEncoder, PatchGrid
from .own_inputs import OwnEncoder, OwnInputs
from .sounds import SoundEncoder
from .transcripts import TranscriptEncoder

AnyEncoder: TypeAlias = Encoder | ImageEncoder | SoundEncoder | OwnEncoder  # the encoder of a model makes its batches


def text_encoder(encoder: AnyEncoder) -> Encoder | None:
    """The encoder of a model's texts, which may be those of its decoder; None for a model that reads none."""
    text = encoder.text if isinstance(encoder, TranscriptEncoder) else encoder
    return text if isinstance(text, Encoder) else None


def tokenized(encoder: AnyEncoder, batch: Batch) -> list[Tokenized]:
    """The tokens of each text of a batch, without padding."""
    text, rows = text_encoder(encoder), []
    for ids, real, pieces in zip(batch.ids.cpu(), batch.mask.cpu(), batch.pieces or batch.tokens, strict=True):
        own = compress(zip(ids.tolist(), pieces, strict=True), real.tolist())
        unknown = [str(piece) for token, piece in own if text is not None and token == text.unknown]
        rows.append(Tokenized(ids[real], tuple(unknown)))
    return rows


def special_keys(encoder: AnyEncoder, stack: str) -> frozenset[int]:
    """The ids of special tokens among the keys of a stack; none if the keys are frames."""
    return encoder.text.special if isinstance(encoder, TranscriptEncoder) and stack == "decoder" else encoder.special


def images_of(encoder: AnyEncoder, batch: Batch) -> Float[Tensor, "batch channel height width"] | None:
    """The images from which a batch of patches was made; None for any other batch."""
    if isinstance(encoder, ImageEncoder):
        return batch.extra["pixel_values"]
    if not isinstance(encoder, OwnEncoder) or encoder.grid is None:
        return None
    shape = encoder.grid.shape
    return next((value for value in batch.extra.values() if value.ndim == 4 and value.shape[1:] == shape), None)


def encoder_of(
    model: PreTrainedModel | OwnModule,
    plan: Architecture,
    text: Encoder | None,
    *,
    own: OwnInputs | None,
    like: Tensor,
    processor: Any,
) -> AnyEncoder:
    """The encoder of a model; `plan` is the architecture of its first stack.

    `text` encodes its tokens, `own` describes the inputs of a user's own module, and `like` is one of its weights.
    """
    if isinstance(model, OwnModule):
        assert own is not None
        return OwnEncoder(model, own.labels, like.device, own.example)
    if plan.reads == "tokens":
        assert text is not None
        return text
    signal = signal_of(model)
    assert signal is not None
    front, config = FrontEnd(model, plan.blocks), signal_config(model)
    if text is not None:
        return TranscriptEncoder(signal, front, config, text, like=like, processor=processor)
    if plan.reads == "sound":
        return SoundEncoder(signal, front, config, like=like, processor=processor)
    grid, interpolates = PatchGrid.of(config), takes_other_sizes(model)
    return ImageEncoder(signal, grid, front, config, interpolates=interpolates, like=like, processor=processor)
