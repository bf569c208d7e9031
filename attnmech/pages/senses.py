"""The section of a report that shows an image or a recording itself."""

import numpy as np
from jaxtyping import Float

from ..basics.nouns import HEARD, IMAGE, INPUT, SOUND, TEXT, Nouns
from ..batch import Batch
from ..draw.section import Section
from ..methods.joint_embedding.patch_images import data_uri
from ..model.inputs.encoders import images_of
from ..model.inputs.sounds import SoundEncoder
from ..model.inputs.spectrograms import spectrogram_of
from ..model.inputs.transcripts import TranscriptEncoder
from ..model.run.hooked import HookedModel
from .sense_sections import picture_section, spectrogram_section


def sense_section(
    model: HookedModel, batch: Batch, pattern: Float[np.ndarray, "layer head query key"], call: str, stack: str = ""
) -> Section | None:
    """The image under the attention of a row, or the spectrogram below it; None if the keys are neither."""
    labels = [label for label, real in zip(batch.tokens[0], batch.mask[0].tolist(), strict=True) if real]
    images = images_of(model.encoder, batch)
    if images is not None and model.grid is not None:
        places = [_place(label) for label in labels]
        if not any(places):
            return None
        return picture_section(data_uri(images[0]), places, pattern, call)
    if isinstance(model.encoder, SoundEncoder) and stack != "decoder":
        spectrogram = spectrogram_of(model.encoder, batch, 0)
        frames = [_seconds(label) for label in labels]
        return spectrogram_section(
            spectrogram.times,
            spectrogram.bands,
            spectrogram.levels,
            units=spectrogram.units,
            frames=frames,
            pattern=pattern,
            call=call,
            crosses=stack == "cross",
        )
    return None


def nouns_of(model: HookedModel, stack: str = "") -> Nouns:
    """The words for a model's (or a stack's) inputs and their positions."""
    if isinstance(model.encoder, TranscriptEncoder):
        return {"encoder": SOUND, "decoder": TEXT, "cross": HEARD}[stack]
    if model.grid is not None:
        return IMAGE
    return {"tokens": TEXT, "pixels": IMAGE, "sound": SOUND, "tensors": INPUT}[model.architecture.reads]


def _place(label: str) -> tuple[int, int] | None:
    row, comma, column = label.partition(",")
    return (int(row), int(column)) if comma and row.isdigit() and column.isdigit() else None


def _seconds(label: str) -> float | None:
    number, unit, _ = label.partition(" s")
    return float(number) if unit and number.replace(".", "").isdigit() else None
