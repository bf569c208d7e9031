"""Describes the inputs of models of images or sound, and computes the input of the first block."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, NoReturn, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.attend import IMPLEMENTATION
from ..parts.mask import MaskRule
from ..parts.modules import stream_of, submodule
from .block_structure import UnreadableError
from .copies import copy_of, use_attention

Kind: TypeAlias = Literal["pixels", "sound"]

KINDS: Final[Mapping[str, Kind]] = {"pixel_values": "pixels", "input_values": "sound", "input_features": "sound"}
"""What a model reads, by the name of its input argument."""

_FRAMES: Final = 12  # the passes that read and prove a model take recordings of at least this many frames


def pair(size: Any) -> tuple[int, int]:
    """Height and width, given as one number or as two."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


@dataclass(frozen=True)
class Signal:
    """The inputs of a model of images or sound."""

    argument: str  # the name of the model's input argument
    shape: tuple[int, ...]  # the shape of one input: channels, height and width; samples; or the axes of a spectrogram

    @property
    def reads(self) -> Kind:
        return KINDS[self.argument]

    @property
    def is_wave(self) -> bool:
        """Whether the input is the samples of a recording of any length."""
        return len(self.shape) == 1

    def noise(self, count: int, seed: int, like: Tensor) -> dict[str, Tensor]:
        """Random images or recordings, by the name of the argument."""
        generator = torch.Generator().manual_seed(seed)
        return {self.argument: torch.randn((count, *self.shape), generator=generator).to(like)}


def signal_config(model: PreTrainedModel) -> Any:
    """The config of that part of a model which reads images or sound."""
    return getattr(model.config, "vision_config", model.config)


def argument_of(model: PreTrainedModel) -> str:
    """The name of a model's main input; the class of a tower may name one that it does not take (Idefics, Llama 4)."""
    taken, named = inspect.signature(model.forward).parameters, str(model.main_input_name)
    return named if named in taken else next((name for name in KINDS if name in taken), named)


def signal_of(model: PreTrainedModel) -> Signal | None:
    """The inputs of a model; None for one of tokens. Raises `UnreadableError` if its config gives no size."""
    argument = argument_of(model)
    if argument not in KINDS or argument not in inspect.signature(model.forward).parameters:
        return None
    config = signal_config(model)
    try:
        return Signal(argument, _shape(argument, config))
    except (AttributeError, TypeError, IndexError) as error:
        raise UnreadableError(f"its config does not say the size of its {argument}") from error


def _shape(argument: str, config: Any) -> tuple[int, ...]:
    if argument == "pixel_values":
        return getattr(config, "num_channels", 3), *pair(config.image_size)
    if argument == "input_features":
        return int(config.num_mel_bins), 2 * int(config.max_source_positions)
    if hasattr(config, "num_mel_bins"):
        return int(config.max_length), int(config.num_mel_bins)
    return (samples_of(config, _FRAMES * getattr(config, "squeeze_factor", 1)),)


def samples_of(config: Any, frames: int) -> int:
    """The smallest number of samples from which the convolutions of a model make this many frames."""
    samples = frames
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        samples = (samples - 1) * stride + kernel
    return samples


def samples_per_frame(config: Any) -> int:
    """The number of samples between the beginnings of consecutive frames."""
    return int(prod(config.conv_stride)) * int(getattr(config, "squeeze_factor", 1))


def encodes_alone(model: PreTrainedModel) -> bool:
    """Whether a model is the encoder of an encoder-decoder, without the decoder."""
    return model.main_input_name in KINDS and not hasattr(model.base_model, "decoder")


def below_head(model: PreTrainedModel) -> nn.Module:
    """The part of a model that turns its inputs into the stream; some base models take the stream instead."""
    base: nn.Module = model.base_model
    of_signals = model.main_input_name in KINDS
    return model if of_signals and model.main_input_name not in inspect.signature(base.forward).parameters else base


def takes_other_sizes(model: nn.Module) -> bool:
    """Whether a model has an option to interpolate its table of positions for images of other sizes."""
    return "interpolate_pos_encoding" in inspect.signature(model.forward).parameters


def size_options(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, bool]:
    """The options that make a model interpolate its positions, for images that are not of its own size."""
    if "pixel_values" not in inputs or not takes_other_sizes(model):
        return {}
    size = pair(signal_config(model).image_size)  # type: ignore[arg-type]
    return {} if tuple(inputs["pixel_values"].shape[2:]) == size else {"interpolate_pos_encoding": True}


class _Entered(Exception):
    """Raised to end a pass where the first block begins."""

    def __init__(self, stream: Tensor, mask: Any) -> None:
        super().__init__()
        self.stream, self.mask = stream, mask


class FrontEnd:
    """Computes the input of the first block without running the blocks."""

    def __init__(self, original: PreTrainedModel, blocks: str) -> None:
        # attnmech's attention receives the mask as a rule.
        copied = use_attention(copy_of(original), IMPLEMENTATION)
        self._model = below_head(copied)
        block_list = submodule(copied.base_model, blocks)
        assert isinstance(block_list, nn.ModuleList)
        block_list[0].register_forward_pre_hook(self._end, with_kwargs=True)

    @staticmethod
    def _end(module: nn.Module, args: Any, kwargs: Any) -> NoReturn:
        rules = (value for value in (*args[1:], *kwargs.values()) if isinstance(value, MaskRule))
        raise _Entered(stream_of(args, kwargs), next(rules, None))

    def __call__(self, inputs: Mapping[str, Any]) -> Float[Tensor, "batch position d_model"]:
        """The stream as it enters the first block; raises the model's own error for wrong inputs."""
        return self.entered(inputs)[0]

    def entered(
        self, inputs: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "batch position d_model"], Bool[Tensor, "batch position"]]:
        """The stream as it enters the first block, and True at the positions that are not padding."""
        try:
            with torch.no_grad():
                self._model(**inputs, return_dict=True)
        except _Entered as entry:
            stream, rule = entry.stream, entry.mask
            if rule is None:
                return stream, torch.ones(stream.shape[:2], dtype=torch.bool, device=stream.device)
            return stream, rule.visible(range(stream.shape[1]))[:, 0].any(dim=1)
        raise AssertionError("a model's first block was not reached")
