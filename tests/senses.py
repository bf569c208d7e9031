"""Small models of images and sound with random weights; all axes have different lengths."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import transformers
from caching import cached
from models import randomised
from torch import Tensor

import attnmech as am

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 22,
}  # fmt: skip
PATCHES: Final[dict[str, Any]] = {"patch_size": 4, "num_channels": 2}
OBLONG: Final[dict[str, Any]] = PATCHES | {"image_size": (8, 12)}
SQUARE: Final[dict[str, Any]] = PATCHES | {"image_size": 12}
WAVES: Final[dict[str, Any]] = SIZES | {
    "conv_dim": (10, 14), "conv_kernel": (6, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 11,
}  # fmt: skip
TEXT: Final[dict[str, Any]] = SIZES | {
    "vocab_size": 50,
    "max_position_embeddings": 19,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHISPER: Final[dict[str, Any]] = {
    "vocab_size": 60, "num_mel_bins": 7, "encoder_layers": 2, "encoder_attention_heads": 3, "decoder_layers": 2,
    "decoder_attention_heads": 3, "d_model": 24, "encoder_ffn_dim": 22, "decoder_ffn_dim": 20,
    "max_source_positions": 9, "max_target_positions": 8, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3,
}  # fmt: skip

TRANSCRIBING: Final[dict[str, Any]] = WHISPER | {
    "decoder_layers": 3, "decoder_attention_heads": 4, "max_target_positions": 31,
    "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip
"""Whisper with its decoder; no token is suppressed in generation."""


def samples(count: int) -> np.ndarray:
    return (0.3 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)


def made(kind: str, config: str, options: dict[str, Any]) -> Any:
    return getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**options))


def two_towers(kind: str) -> Any:
    return made(f"{kind}Model", kind, {"text_config": TEXT, "vision_config": SIZES | SQUARE})


DINO: Final[dict[str, Any]] = SQUARE | {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "mlp_ratio": 2,
}

BEIT: Final[dict[str, Any]] = SIZES | SQUARE | {"layer_scale_init_value": 0.0}

IMAGES: Final[dict[str, Callable[[], Any]]] = {
    "vit": lambda: made("ViTForImageClassification", "ViT", SIZES | OBLONG),
    "deit": lambda: made("DeiTForImageClassification", "DeiT", SIZES | OBLONG),
    "dinov2": lambda: made("Dinov2ForImageClassification", "Dinov2", DINO),
    "dinov2_registers": lambda: made(
        "Dinov2WithRegistersModel", "Dinov2WithRegisters", DINO | {"num_register_tokens": 3}
    ),
    "dinov3": lambda: made("DINOv3ViTModel", "DINOv3ViT", SIZES | SQUARE | {"num_register_tokens": 3}),
    "clip_vision": lambda: two_towers("CLIP").vision_model,
    "clip_projected": lambda: made(
        "CLIPVisionModelWithProjection", "CLIPVision", SIZES | SQUARE | {"projection_dim": 7}
    ),
    "siglip_vision": lambda: two_towers("Siglip").vision_model,
    "vit_msn": lambda: made("ViTMSNModel", "ViTMSN", SIZES | SQUARE),
    "ijepa": lambda: made("IJepaForImageClassification", "IJepa", SIZES | SQUARE),
    "aimv2": lambda: made("Aimv2VisionModel", "Aimv2Vision", SIZES | SQUARE),
    "beit": lambda: made("BeitForImageClassification", "Beit", BEIT | {"use_relative_position_bias": True}),
    "beit_shared": lambda: made(
        "BeitModel", "Beit", BEIT | {"use_shared_relative_position_bias": True, "layer_scale_init_value": 0.1}
    ),
    "yolos": lambda: made(
        "YolosForObjectDetection", "Yolos",
        SIZES | OBLONG | {"image_size": [8, 12], "num_detection_tokens": 5, "use_mid_position_embeddings": False},
    ),
}  # fmt: skip

WAVE: Final[dict[str, Callable[[], Any]]] = {
    "wav2vec2": lambda: made("Wav2Vec2ForCTC", "Wav2Vec2", WAVES),
    "wav2vec2_stable": lambda: made(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2",
        WAVES | {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "classifier_proj_size": 9},
    ),
    "hubert": lambda: made("HubertModel", "Hubert", WAVES),
    "unispeech_sat": lambda: made("UniSpeechSatForCTC", "UniSpeechSat", WAVES),
    "data2vec_audio": lambda: made("Data2VecAudioForCTC", "Data2VecAudio", WAVES | {"conv_pos_kernel_size": 5}),
    "sew": lambda: made("SEWForCTC", "SEW", WAVES | {"squeeze_factor": 2}),
}  # fmt: skip

SPECTROGRAMS: Final[dict[str, Callable[[], Any]]] = {
    "ast": lambda: made(
        "ASTForAudioClassification", "AST",
        SIZES | {"patch_size": 4, "frequency_stride": 3, "time_stride": 2, "max_length": 13, "num_mel_bins": 10},
    ),
    "whisper_encoder": lambda: made("WhisperModel", "Whisper", WHISPER).get_encoder(),
    "whisper_classifier": lambda: made(
        "WhisperForAudioClassification", "Whisper", WHISPER | {"classifier_proj_size": 9}
    ),
}  # fmt: skip

SOUND: Final = WAVE | SPECTROGRAMS
SENSES: Final = IMAGES | SOUND


def raw(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A separate model, in eager attention."""
    model = randomised(SENSES[name](), dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@cached
def plain(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, shared by the tests, which must not change it."""
    return raw(name, dtype)


@cached
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    """attnmech's model of the same weights, shared."""
    return am.load(plain(name, dtype))


def inputs_of(name: str, count: int = 3, dtype: torch.dtype = torch.float32, seed: int = 5) -> dict[str, Tensor]:
    """Random images or recordings; the second recording is shorter, padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    signal = hooked(name).encoder.signal  # type: ignore[union-attr]
    shape = (count, 137) if name in WAVE else (count, *signal.shape)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if name not in WAVE:
        return {signal.argument: values}
    mask = torch.ones(shape, dtype=torch.long)
    mask[1:2, 81:] = 0
    return {signal.argument: values * mask, "attention_mask": mask}
