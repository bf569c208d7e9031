"""Makes one `Batch` from recordings: its positions are frames, labelled with their times."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ...basics.arguments import dense, shown
from ...basics.messages import first_line
from ...batch import Batch
from ...errors import InputError
from ..structure.signals import FrontEnd, Signal, samples_of, samples_per_frame
from .images import names_of
from .patches import Lines, patch_places
from .processors import Prepared

RATE: Final = 16_000  # samples per second, unless the model's config or processor gives another rate
_HOP: Final = 160  # samples between two columns of a spectrogram, unless the config or the processor says otherwise


class SoundEncoder:
    """Turns recordings into a batch for one model."""

    special: Final[frozenset[int]] = frozenset()  # empty, since frames are not special tokens of a tokenizer

    def __init__(self, signal: Signal, front: FrontEnd, config: Any, *, like: Tensor, processor: Any) -> None:
        self.signal, self._front = signal, front
        self.device, self.dtype = like.device, like.dtype
        self.rate = int(getattr(processor, "sampling_rate", RATE))  # samples per second
        self._further: tuple[str, ...] = ("attention_mask",) if signal.is_wave else ()  # that a mapping may hold
        self._names: tuple[str, ...] = ()
        self._patches: tuple[tuple[int, int] | None, ...] = ()
        """In a model of patches, the frequency and time of each position, in steps of the patches."""
        self._least = ""
        self._mels = 1  # the number of mel bands between the beginnings of two patches
        self.seconds_per_column = int(getattr(processor, "hop_length", _HOP)) / self.rate
        """In a model of spectrograms, the time between two columns."""
        hop, longest = int(getattr(processor, "hop_length", _HOP)), None
        if signal.is_wave:
            self.hop = samples_per_frame(config)
            self._least = f"A recording of one frame has {samples_of(config, 1)} samples."
        elif signal.argument == "input_features":
            self.hop, longest = 2 * hop, signal.shape[1] * hop / self.rate
        else:
            self.hop, self._mels, longest = (
                hop * config.time_stride,
                int(config.frequency_stride),
                signal.shape[0] * hop / self.rate,
            )
            times, mels = signal.shape
            bands = Lines(1, mels, config.patch_size, config.frequency_stride)
            frames = Lines(0, times, config.patch_size, config.time_stride)
            self._patches = tuple(patch_places(self._front, signal, like, bands, frames))
            self._names = names_of(config, sum(place is None for place in self._patches))
        self._prepare = Prepared(processor, "sound", signal.argument, seconds=longest)

    @property
    def seconds(self) -> float:
        """The time between the beginnings of two frames."""
        return self.hop / self.rate

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """The labels of the positions with these ids: the time at which the frame begins, in seconds."""
        return tuple(map(self._text, ids))

    def _text(self, number: int) -> str:
        if not self._patches:
            return f"{number * self.seconds:.{self._digits}f} s"
        place = self._patches[number]
        if place is None:
            return self._names[sum(patch is None for patch in self._patches[:number])]
        return f"{place[1] * self.seconds:.{self._digits}f} s, mel {place[0] * self._mels}"

    @property
    def _digits(self) -> int:
        """The number of decimals, up to 4, that shows the time of every frame exactly."""
        return next((digits for digits in (2, 3) if abs(round(self.seconds, digits) - self.seconds) < 1e-9), 4)

    def encode(self, inputs: Any, bos: bool | None = None) -> Batch:
        """One batch from the model's inputs, as a tensor or a mapping, or from recordings.

        Recordings need the model's processor; a recording is (rate, samples) as `scipy.io.wavfile.read` returns it, or
        a `Path` of a WAV file. Lists of recordings are accepted.
        """
        if bos is not None:
            raise InputError("bos is only for texts; this model reads sound. Leave it out.")
        name = self.signal.argument
        if isinstance(inputs, Mapping):
            named = dict(inputs)
        else:
            named = {name: inputs} if isinstance(inputs, Tensor) else dict(self._prepare(inputs))
        values, mask = named.pop(name, None), named.pop("attention_mask", None)
        if values is None or named:
            more = "".join(f' and may hold "{further}"' for further in self._further)
            raise InputError(
                f'a mapping of inputs for this model must hold "{name}"{more}; got {sorted(map(str, inputs))}. A '
                "recording is (samples per second, samples)."
            )
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = str(values.dtype) if isinstance(values, Tensor) else shown(values)
            raise InputError(
                f"this model reads sound: give a floating-point tensor of {name}, {self._axes}; got {got}."
            )
        dense(name, values)
        values = values[None] if values.ndim == len(self.signal.shape) else values
        wrong = values.ndim != 1 + len(self.signal.shape) or len(values) == 0
        if wrong or (not self.signal.is_wave and tuple(values.shape[1:]) != self.signal.shape):
            raise InputError(f"{name} must have the shape {self._axes}; got {tuple(values.shape)}.")
        return self._batch(values.to(device=self.device, dtype=self.dtype), mask)

    @property
    def _axes(self) -> str:
        return "[batch, samples]" if self.signal.is_wave else f"[batch, {', '.join(map(str, self.signal.shape))}]"

    def _batch(self, values: Tensor, mask: Any) -> Batch:
        inputs = {self.signal.argument: values}
        if mask is not None and self.signal.is_wave:
            inputs["attention_mask"] = self._checked(mask, values)
        try:
            stream, real = self._front.entered(inputs)
        except Exception as error:  # models raise many kinds of errors for wrong recordings
            raise InputError(
                f"the model does not run on {self.signal.argument} of the shape {tuple(values.shape)}: "
                f"{first_line(error)}. {self._least}"
            ) from error
        ids = torch.arange(stream.shape[1], device=self.device).expand(len(values), -1)
        labels = self.position_texts(ids[0].tolist())
        pieces = (("",) * len(labels),) * len(values)
        return Batch(ids, real, (labels,) * len(values), None, extra=inputs, pieces=pieces)

    def _checked(self, mask: Any, values: Tensor) -> Tensor:
        mask = torch.as_tensor(mask, device=self.device)
        if mask.shape != values.shape or not ((mask == 0) | (mask == 1)).all() or not mask.any(dim=1).all():
            raise InputError(
                f"attention_mask must have the shape of the samples, {tuple(values.shape)}, with 1 at samples and 0 at "
                f"padding; got {tuple(mask.shape)}."
            )
        long: Tensor = mask.long()
        return long
