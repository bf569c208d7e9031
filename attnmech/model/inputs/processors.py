"""Makes a model's inputs from pictures and recordings, by the model's own processor."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, PreTrainedModel

from ...basics.arguments import shown
from ...basics.messages import first_line
from ...errors import InputError
from ..structure.signals import KINDS, Kind, argument_of
from ..structure.text_part import taken_besides

_FILES: Final = ("preprocessor_config.json", "processor_config.json")


@runtime_checkable
class Picture(Protocol):
    """A Pillow image."""

    mode: str

    def convert(self, mode: str) -> "Picture":
        """Converts the picture to another colour mode, such as "RGB"."""
        ...


Recording: TypeAlias = tuple[int, np.ndarray]  # samples per second, and samples: what `scipy.io.wavfile.read` returns


def processor_in(folder: Path, model: PreTrainedModel) -> Any:
    """The processor in a model's folder; None if there is none, or the model reads only text."""
    reads = KINDS.get(argument_of(model))
    if not any((folder / file).is_file() for file in _FILES) or (reads is None and not _takes_more(model)):
        return None
    auto: Any = {None: AutoProcessor, "pixels": AutoImageProcessor}.get(reads, AutoFeatureExtractor)
    try:
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError:
        return None  # without Pillow, tensors still work, and an error for pictures says what is missing
    except Exception as error:
        raise InputError(f"folder {folder}: its processor cannot be read: {first_line(error)}") from error


def _takes_more(model: PreTrainedModel) -> bool:
    return bool(taken_besides(inspect.signature(model.forward).parameters))


def check_processor(processor: Any, model: PreTrainedModel) -> Any:
    """The part of a processor that a model needs; raises `InputError` for anything that is not its processor."""
    reads = KINDS.get(argument_of(model))
    if reads is None:
        if not _takes_more(model):
            raise InputError(
                "`processor` is for models of images and sound; this one reads text: give its `tokenizer`."
            )
        if not callable(processor) or getattr(processor, "tokenizer", None) is None:
            raise InputError(
                "`processor` must read texts with images or sounds: AutoProcessor.from_pretrained(folder); got "
                f"{shown(processor)}."
            )
        return processor
    part = getattr(processor, "image_processor" if reads == "pixels" else "feature_extractor", processor)
    wanted = argument_of(model)
    if not callable(part) or wanted not in getattr(part, "model_input_names", ()):
        kind = "AutoImageProcessor" if reads == "pixels" else "AutoFeatureExtractor"
        raise InputError(
            f"`processor` must be a transformers processor that makes {wanted}; got {shown(processor)}. Make one with "
            f"{kind}.from_pretrained(folder)."
        )
    return part


@dataclass(frozen=True)
class Prepared:
    """Makes a model's inputs from pictures or recordings."""

    processor: Any
    reads: Kind
    argument: str
    channels: int = 3
    seconds: float | None = None  # the longest recording, in seconds; None if any length works

    def __call__(self, inputs: Any) -> Mapping[str, Any]:
        """The model's inputs for one picture or recording, or a list of them."""
        single = not isinstance(inputs, list)
        signals = [inputs] if single else inputs
        if not signals:
            raise InputError("the list of inputs is empty; give at least one.")
        if self.reads == "pixels":
            pictures = [_picture(signal, self.channels) for signal in signals]
            self._require("image")
            return self._made(images=pictures)
        recordings = [_recording(signal) for signal in signals]
        self._require("sound")
        rate = int(self.processor.sampling_rate)
        heard = [_samples_at(rate, recording) for recording in recordings]
        for samples in heard:
            if self.seconds is not None and len(samples) > self.seconds * rate:
                raise InputError(
                    f"this model takes recordings of up to {self.seconds:g} s; this one has {len(samples) / rate:.4g} "
                    "s. Cut it."
                )
        options = {"padding": True} if self.argument == "input_values" and self.seconds is None else {}
        return self._made(raw_speech=heard, sampling_rate=rate, **options)

    def _require(self, what: str) -> None:
        if self.processor is not None:
            return
        kind = "AutoImageProcessor" if what == "image" else "AutoFeatureExtractor"
        pillow = ", which needs Pillow: pip install 'attnmech[images]'" if what == "image" else ""
        raise InputError(
            f"this model was loaded without its processor (preprocessor_config.json in its folder), so it takes "
            f"{self.argument} as a tensor; or load it with one: am.load(model, "
            f"processor={kind}.from_pretrained(folder)){pillow}."
        )

    def _made(self, **options: Any) -> Mapping[str, Any]:
        made = _made_by(self.processor, **options)
        return {name: made[name] for name in (self.argument, "attention_mask") if name in made}


@dataclass(frozen=True)
class Pictures:
    """The user's pictures of one text, and how they become the model's inputs."""

    sizes: Sequence[tuple[int, int]]  # the width and height of each picture, in the order of the text
    processed: Callable[[Sequence[Any]], Mapping[str, Any]]
    """Makes the model's inputs from Pillow images of these sizes, in place of the user's: the same text and options."""
    images: Sequence[Any] = ()  # the user's, as Pillow images


def both_processed(
    processor: Any, text: str, images: Sequence[Any], sounds: Sequence[Any], **options: Any
) -> tuple[Mapping[str, Any], Pictures | None]:
    """The model's inputs for one text with pictures and sounds among its tokens, and the pictures."""
    if processor is None:
        raise InputError(
            "this model was loaded without its processor, so it takes what that returns for each text; or load it with "
            "one: am.load(model, processor=AutoProcessor.from_pretrained(folder))."
        )
    if sounds:
        rate = int(processor.feature_extractor.sampling_rate)
        options |= {"audio": [_samples_at(rate, _recording(sound)) for sound in sounds], "sampling_rate": rate}
    processed = partial(_made_by, processor, text=[text], return_mm_token_type_ids=True, **options)
    if not images:
        return processed(), None
    pictures = [_as_pillow(_picture(image, 3)) for image in images]
    of_images = partial(_of_images, processed)
    return of_images(pictures), Pictures([image.size for image in pictures], of_images, pictures)


def _of_images(processed: Callable[..., Mapping[str, Any]], images: Sequence[Any]) -> Mapping[str, Any]:
    return processed(images=[list(images)])


def _as_pillow(picture: Any) -> Any:
    if not isinstance(picture, np.ndarray):
        return picture
    from PIL import Image

    return Image.fromarray(picture)


def _samples_at(rate: int, recording: tuple[int, np.ndarray]) -> np.ndarray:
    """The samples of a recording; raises `InputError` for another rate than the model's."""
    own_rate, samples = recording
    if own_rate != rate:
        raise InputError(
            f"this model takes {rate} samples per second; the recording has {own_rate}. Resample it: "
            f"scipy.signal.resample_poly(samples, {rate}, {own_rate})."
        )
    return samples


def _made_by(processor: Any, **options: Any) -> Mapping[str, Any]:
    try:
        made: Mapping[str, Any] = processor(**options, return_tensors="pt")
    except Exception as error:  # processors raise many kinds of errors for wrong inputs
        raise InputError(f"the model's processor cannot read this: {first_line(error)}") from error
    return made


def _picture(picture: Any, channels: int) -> Any:
    """A picture in the model's colour mode, from a Pillow image, a file, or an array [height width 3] of bytes."""
    if isinstance(picture, Path):
        picture = _opened(picture)
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise InputError(
                f"an image as an array must be uint8 [height width 3]; got {picture.dtype} {picture.shape}. For pixel "
                "values that are ready for the model: torch.tensor(...)."
            )
        return picture
    if isinstance(picture, Picture):
        return picture.convert("L" if channels == 1 else "RGB")
    raise InputError(
        "this model reads images: give a PIL image, a pathlib.Path of one, an array [height width 3] of uint8, a list "
        f"of these, or a floating-point tensor of pixel values; got {shown(picture)}."
    )


def _opened(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(f"to read {path}: pip install 'attnmech[images]' (Pillow).") from error
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except OSError as error:
        raise InputError(f"{path} cannot be read as an image: {first_line(error)}.") from error


def _recording(recording: Any) -> tuple[int, np.ndarray]:
    """Samples per second, and the samples between -1 and 1."""
    from scipy.io import wavfile  # type: ignore[import-untyped]

    if isinstance(recording, Path):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", wavfile.WavFileWarning)
                recording = wavfile.read(recording)
        except (OSError, ValueError) as error:
            raise InputError(f"{recording} cannot be read as a WAV file: {first_line(error)}.") from error
    pair = isinstance(recording, Sequence) and not isinstance(recording, str) and len(recording) == 2
    if not pair or not isinstance(recording[0], int | np.integer) or not isinstance(recording[1], np.ndarray):
        raise InputError(
            "this model reads sound: give (samples per second, samples) as scipy.io.wavfile.read returns them, a "
            f"pathlib.Path of a WAV file, a list of these, or a floating-point tensor; got {shown(recording)}."
        )
    rate, samples = int(recording[0]), recording[1]
    if samples.ndim != 1 or len(samples) == 0:
        raise InputError(
            "a recording must have one channel: samples [time]; got "
            f"{'x'.join(map(str, samples.shape))}. For stereo sound: samples.mean(axis=1)."
        )
    if samples.dtype == np.uint8:
        samples = samples.astype(np.float32) / 128 - 1
    elif np.issubdtype(samples.dtype, np.integer):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if not np.issubdtype(samples.dtype, np.floating) or not np.isfinite(samples).all():
        raise InputError(f"the samples must be finite numbers; got {samples.dtype}.")
    return rate, samples.astype(np.float32)
