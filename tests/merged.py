"""Small models of text with pictures or sounds, and inputs for them, with no axis of the size of another."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import models
import numpy as np
import tiny
import torch
import transformers
from PIL import Image
from torch import Tensor

IMAGE: Final = 33
_SIDE, _PATCH = 32, 8
_VISION: Final = {"vision_config.image_size": _SIDE, "vision_config.patch_size": _PATCH}
_TEXT_WIDTH: Final = 48


@dataclass(frozen=True)
class Kind:
    """A model type with its small config, and what its processor would make of a picture."""

    senses: Callable[[int], Mapping[str, Tensor]]
    """The inputs of the picture with a number."""
    tokens: int = 4
    """The number of tokens that stand for it."""
    sizes: Mapping[str, Any] = field(default_factory=lambda: _VISION)
    placeholder: str = "image_token_id"
    types: str | None = None
    """The argument that marks the tokens of pictures with 1, if the model needs it."""
    first: int = 2
    """Where they begin."""


def _noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _pixels(number: int) -> dict[str, Tensor]:
    return {"pixel_values": _noise(number, 1, 3, _SIDE, _SIDE)}


def _rows(number: int) -> dict[str, Tensor]:
    high, wide = (4, 6)
    return {
        "pixel_values": _noise(number, high * wide, 3 * 2 * _PATCH**2),
        "image_grid_thw": torch.tensor([[1, high, wide]]),
    }


def _heard(number: int) -> dict[str, Tensor]:
    return {"input_features": _noise(number, 1, 16, 20), "feature_attention_mask": torch.ones(1, 20, dtype=torch.long)}


def _tiles(number: int) -> dict[str, Tensor]:
    return {"pixel_values": _noise(number, 1, 5, 3, _SIDE, _SIDE), "image_sizes": torch.tensor([[60, 60]])}


_GRID: Final = {"vision_config.patch_size": _PATCH}
_OUT: Final = {**_GRID, "vision_config.out_hidden_size": _TEXT_WIDTH}
KINDS: Final = {
    "llava": Kind(_pixels, 16, placeholder="image_token_index"),
    "gemma3": Kind(_pixels, sizes={**_VISION, "mm_tokens_per_image": 4, "boi_token_index": 40, "eoi_token_index": 41},
                   placeholder="image_token_index", types="token_type_ids"),
    "qwen2_vl": Kind(_rows, 6, _GRID, types="mm_token_type_ids"),
    "qwen2_5_vl": Kind(_rows, 6, _OUT, types="mm_token_type_ids"),
    "idefics3": Kind(lambda number: {"pixel_values": _pixels(number)["pixel_values"][None]},
                     sizes={**_VISION, "scale_factor": 2}),
    "mistral3": Kind(lambda number: {**_pixels(number), "image_sizes": torch.tensor([[_SIDE, _SIDE]])},
                     sizes={**_VISION, "vision_config.head_dim": 8, "spatial_merge_size": 2},
                     placeholder="image_token_index"),
    "internvl": Kind(_pixels, sizes={path: [size] * 2 for path, size in _VISION.items()}),
    "aya_vision": Kind(_pixels, sizes={**_VISION, "downsample_factor": 2}, placeholder="image_token_index"),
    "llava_next": Kind(_tiles, 88, {**_VISION, "image_grid_pinpoints": [[64, 64]]}, "image_token_index"),
    "paligemma": Kind(_pixels, 16, {**_VISION, "vision_config.projection_dim": _TEXT_WIDTH}, "image_token_index",
                      types="token_type_ids", first=0),
    "qwen2_audio": Kind(_heard, 5, {"audio_config.num_mel_bins": 16, "audio_config.max_source_positions": 10},
                        "audio_token_index"),
}  # fmt: skip
LLAMA4: Final = Kind(_pixels, 4, {**_VISION, **{f"vision_config.{name}": size for name, size in {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "vision_output_dim": 44,
    "projector_input_dim": 44, "projector_output_dim": 44}.items()}}, "image_token_index")  # fmt: skip
"""Llama 4, whose tower rotates its patches, and not the class token after them."""
PHI4: Final = Kind(
    lambda number: {"image_pixel_values": _noise(number, 1, 2, 3, _SIDE, _SIDE),
                    "image_sizes": torch.tensor([[_SIDE, _SIDE]]),
                    "image_attention_mask": torch.ones(1, 2, 4, 4).long()},
    13, {**_VISION, "vision_config.crop_size": _SIDE, "audio_config.num_blocks": 2}, "vision_config.image_token_id",
)  # fmt: skip
"""Phi-4, in which a module beside the blocks merges pictures with the tokens."""
MLLAMA: Final = Kind(
    lambda number: {"pixel_values": _noise(number, 1, 1, 2, 3, _SIDE, _SIDE),
                    "aspect_ratio_ids": torch.tensor([[1]]), "aspect_ratio_mask": torch.ones(1, 1, 2).long()},
    1, {**_VISION, "vision_config.max_num_tiles": 2, "vision_config.num_global_layers": 2,
        "vision_config.attention_heads": 6, "vision_config.vision_output_dim": 96,
        "vision_config.intermediate_layers_indices": [0], "text_config.cross_attention_layers": [1, 3]},
    "image_token_index",
)  # fmt: skip
"""Mllama, whose blocks 1 and 3 read pictures by cross-attention."""
DEEP: Final = Kind(_rows, 6, {**_OUT, "vision_config.deepstack_visual_indexes": [0, 2]}, types="mm_token_type_ids")
"""Qwen3-VL, which adds what it reads of a picture to the stream between blocks."""


def model_of(kind: str, made: Kind | None = None) -> Any:
    made = made or KINDS[kind]
    return tiny.merging(kind, made.sizes, **{made.placeholder: IMAGE})


def inputs_of(made: Kind, number: int, words: int) -> dict[str, Tensor]:
    """A text with one picture and some words, as a processor returns it."""
    ids = torch.randint(50, 90, (1, words + made.tokens), generator=torch.Generator().manual_seed(number))
    ids[0, made.first : made.first + made.tokens] = IMAGE
    types = torch.zeros_like(ids) if made.first == 0 else (ids == IMAGE).long()
    return {"input_ids": ids, **made.senses(number), **({made.types: types} if made.types else {})}


def picture(seed: int, *, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def recording(seed: int) -> tuple[int, np.ndarray]:
    return 16000, np.random.default_rng(seed).normal(size=16000).astype(np.float32)


def with_processor(kind: str) -> tuple[Any, Any, str]:
    """A plain model, a processor for it, and what stands for a picture or a sound in a text."""
    make, mark, special, named = _PROCESSORS[kind]
    tokenizer = models.tokenizer(has_bos=True, adds_bos=True)
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer._set_model_specific_special_tokens(named)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %} " + mark + " {% endif %}{% endfor %}{% endfor %}"
    )
    made = KINDS[kind]
    plain = tiny.merging(kind, made.sizes, **{made.placeholder: tokenizer.convert_tokens_to_ids(special[0])})
    processor = make(tokenizer)
    processor.chat_template = tokenizer.chat_template
    return plain, processor, mark


def _pil(kind: str, **sizes: Any) -> Any:
    """An image processor that needs no torchvision."""
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    name = next(name for name in vars(module) if name.lower() == f"{kind}imageprocessorpil")
    return getattr(module, name)(**sizes)


_EDGE: Final = {"height": _SIDE, "width": _SIDE}
_PROCESSORS: Final[dict[str, tuple[Callable[[Any], Any], str, list[str], dict[str, str]]]] = {
    "llava": (
        lambda tokenizer: transformers.LlavaProcessor(
            _pil("clip", size={"shortest_edge": _SIDE}, crop_size=_SIDE), tokenizer, patch_size=_PATCH,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        ),
        "<image>", ["<image>"], {},
    ),
    "gemma3": (
        lambda tokenizer: transformers.Gemma3Processor(_pil("gemma3", size=_EDGE), tokenizer, image_seq_length=4),
        "<boi>", ["<soft>", "<boi>", "<eoi>"], {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    ),
    "idefics3": (
        lambda tokenizer: transformers.Idefics3Processor(
            _pil("idefics3", size={"longest_edge": 2 * _SIDE}, max_image_size={"longest_edge": _SIDE}), tokenizer,
            image_seq_len=4,
        ),
        "<image>", ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"], {},
    ),
    "qwen2_audio": (
        lambda tokenizer: transformers.Qwen2AudioProcessor(
            transformers.WhisperFeatureExtractor(16, chunk_length=1, n_fft=64, hop_length=800), tokenizer
        ),
        "<|audio_bos|><|AUDIO|><|audio_eos|>", ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], {},
    ),
}  # fmt: skip
