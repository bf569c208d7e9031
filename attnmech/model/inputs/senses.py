"""What makes batches for a model of images or sound, or of sound and what is written of it?"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..structure.signals import FrontEnd, signal_config, signal_of, takes_other_sizes
from .encoder import Encoder
from .images import ImageEncoder, PatchGrid
from .sounds import SoundEncoder
from .transcripts import TranscriptEncoder


def signal_encoder(
    model: PreTrainedModel,
    blocks: str,
    grid: PatchGrid | None,
    like: Tensor,
    processor: Any,
    text: Encoder | None = None,
) -> ImageEncoder | SoundEncoder:
    """The encoder of a model of images or sound whose blocks stand at a path.

    `like` is one of its weights, `text` makes what its decoder reads.
    """
    signal = signal_of(model)
    assert signal is not None
    front, config = FrontEnd(model, blocks), signal_config(model)
    if text is not None:
        return TranscriptEncoder(signal, front, config, text, like=like, processor=processor)
    if grid is None:
        return SoundEncoder(signal, front, config, like=like, processor=processor)
    return ImageEncoder(
        signal, grid, front, config, interpolates=takes_other_sizes(model), like=like, processor=processor
    )
