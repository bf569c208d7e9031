"""Makes `pictures_in_text.md`: small random models of text with images or sound, given a picture, and their towers.

`python examples/pictures_in_text.py` from a checkout (some minutes); needs the packages of the tests. With names of
model types, it prints their rows.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

import attnmech as am

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import merged
import models
import tiny
from merged import Kind, inputs_of

SAME: Final = 5e-5
"""Logits may differ by this much, relative to the largest, and patterns absolutely."""
ABOUT: Final = f"""# Pictures and sound in a text

Small models with random weights, which transformers {transformers.__version__} builds from its configs. Made by
`python examples/pictures_in_text.py`.

- **text**: whether `am.load` certifies the model on text; else the reason.
- **picture or sound**: "equal" if two texts of different lengths, each with its picture or sound, have the logits of
  plain transformers as a batch, and the patterns of eager attention in the text's blocks (both within {SAME:.0e});
  the largest differences follow. Other pixels change the logits by at least 0.1. Else why pictures are refused.
- **tower**: whether `model.vision` (or `model.sound`) is certified; else the reason.
"""
_ROPE: Final = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_HIGH, _WIDE = 32, 8  # of an image, and of a patch


def _noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _vision(**sizes: Any) -> dict[str, Any]:
    return {f"vision_config.{name}": size for name, size in sizes.items()}


_SQUARE: Final = _vision(image_size=_HIGH, patch_size=_WIDE)
_ROWS: Final = merged.KINDS["qwen2_vl"].senses
_OUT: Final = _vision(patch_size=_WIDE, out_hidden_size=48)
_GEMMA4: Final = {
    "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "patch_size": _WIDE, "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}  # fmt: skip


def _placed(number: int) -> dict[str, Tensor]:
    """Gemma 4's patches, each with its column and row."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(6)).flip(1)[None]
    return {"pixel_values": _noise(number, 1, 24, 3 * _WIDE**2).sigmoid(), "image_position_ids": places}


_KINDS: Final[Mapping[str, Kind]] = {
    **merged.KINDS,
    "fuyu": Kind(lambda number: {"pixel_values": _noise(number, 1, 6, 3 * _WIDE**2)}, 6, {"patch_size": _WIDE}),
    "gemma4": Kind(_placed, 6, {
        "vision_config": transformers.Gemma4VisionConfig(**_GEMMA4), "boi_token_id": 40, "eoi_token_id": 41,
        "video_token_id": 42, "audio_token_id": 43, "boa_token_id": 44, "eoa_token_index": 45,
    }, types="mm_token_type_ids"),
    "glm4v": Kind(_ROWS, 6, {**_OUT, **_vision(depth=3, image_size=_HIGH), "text_config.rope_parameters": _ROPE},
                  types="mm_token_type_ids"),
    "idefics2": Kind(lambda number: {"pixel_values": _noise(number, 1, 1, 3, _HIGH, _HIGH)}, 3, {
        **_SQUARE, "perceiver_config.resampler_n_latents": 3, "perceiver_config.resampler_depth": 2,
        "perceiver_config.resampler_n_heads": 4, "perceiver_config.resampler_head_dim": 10,
    }),
    "llama4": merged.LLAMA4,
    "llava_onevision": Kind(merged.KINDS["llava_next"].senses, 88, {**_SQUARE, "image_grid_pinpoints": [[64, 64]]},
                            "image_token_index"),
    "mllama": merged.MLLAMA,
    "phi4_multimodal": merged.PHI4,
    "qwen2_5_omni_thinker": Kind(_ROWS, 6, {**_OUT, **_vision(depth=3, window_size=32, fullatt_block_indexes=[1])},
                                 "image_token_index"),
    "qwen3_5": Kind(_ROWS, 6, {
        **_OUT, **_vision(depth=3, num_position_embeddings=36), "text_config.linear_key_head_dim": 12,
        "text_config.linear_value_head_dim": 14, "text_config.linear_num_key_heads": 2,
        "text_config.linear_num_value_heads": 4, "text_config.layer_types": ["linear_attention", "full_attention"] * 2,
        "text_config.rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    }, types="mm_token_type_ids"),
    "qwen3_vl": merged.DEEP,
    "smolvlm": Kind(merged.KINDS["idefics3"].senses, sizes={**_SQUARE, "scale_factor": 2}),
    "vipllava": Kind(merged.KINDS["llava"].senses, 16, {**_SQUARE, "vision_feature_layer": [-1, -2]},
                     "image_token_index"),
    "voxtral": Kind(lambda number: {"input_features": _noise(number, 1, 16, 40)}, 5, {
        "audio_config.num_mel_bins": 16, "audio_config.max_source_positions": 20, "audio_config.intermediate_size": 192,
    }, "audio_token_id"),
    "blip-2": Kind(merged.KINDS["llava"].senses, 5, {**_SQUARE, "num_query_tokens": 5}),
    "cohere2_vision": Kind(merged.KINDS["llava"].senses, 4, {**_SQUARE, "downsample_factor": 2}),
    "deepseek_vl": Kind(merged.KINDS["llava"].senses, 16, _SQUARE),
    "got_ocr2": Kind(merged.KINDS["llava"].senses, 1, _SQUARE),
    "lighton_ocr": Kind(merged.KINDS["mistral3"].senses, 4, merged.KINDS["mistral3"].sizes),
    "llava_next_video": Kind(merged.KINDS["llava_next"].senses, 88, {**_SQUARE, "image_grid_pinpoints": [[64, 64]]},
                             "image_token_index"),
    "ovis2": Kind(merged.KINDS["llava"].senses, 16, _SQUARE),
    "qianfan_ocr": Kind(merged.KINDS["internvl"].senses, 4, merged.KINDS["internvl"].sizes),
}  # fmt: skip
_ALIKE: Final = {
    "glm46v": "glm4v", "glm4v_moe": "glm4v", "glm_ocr": "glm4v", "qwen3_5_moe": "qwen3_5", "qwen3_vl_moe": "qwen3_vl",
}  # fmt: skip
_UNTYPED: Final = ("exaone4_5", "hyperclovax_vision_v2")
KINDS: Final[Mapping[str, Kind]] = {
    **_KINDS,
    **{name: _KINDS[like] for name, like in _ALIKE.items()},
    **dict.fromkeys(_UNTYPED, replace(_KINDS["qwen2_5_vl"], types=None)),
}
"""Small models of each type, with the inputs of a picture or a sound."""


def model_of(name: str) -> Any:
    """The plain model of a type."""
    config = tiny.config_of(name)
    if name == "qwen2_5_omni_thinker":
        transformers.Qwen2_5OmniThinkerConfig.vision_start_token_id = 90
    if name == "gemma4":
        config.text_config.hidden_size_per_layer_input = 12
    plain = merged.model_of(name, KINDS[name])
    if name == "llama4":  # whose complex buffer a cast to float32 makes real
        turned = plain.vision_model.rotary_embedding
        turned.freqs_ci = turned._compute_freqs_ci(turned.config)
    return plain


def sentence(run: Callable[[], str]) -> str:
    """What a function returns, or the reason of the error that attnmech raises."""
    try:
        return run()
    except am.AttnmechError as error:
        message = " ".join(str(error).split()).partition(" If you know how it is built")[0]
        for start in ("its structure cannot be read: ", "is not supported: ", "reads only the text of this model: "):
            message = message.partition(start)[2] or message
        return f"refused: {message.rstrip('.')}"


def compared(model: am.HookedModel, name: str) -> str:
    """A batch of two texts against plain transformers, on each of them alone."""
    made = KINDS[name]
    texts = [inputs_of(made, 0, 9), inputs_of(made, 1, 12)]
    run = model.run(texts, points=["pattern", "logits"])
    plain = model_of(name)
    other = {name: -value if value.is_floating_point() else value for name, value in texts[0].items()}
    worst = 0.0
    with torch.no_grad():
        expected = [plain(**text).logits[0] for text in texts]
        assert float((plain(**other).logits[0] - expected[0]).abs().max()) > 0.1, "pixels change nothing"
        near = models.in_attention(model_of(name), "eager")
        for part in ("vision_config", "audio_config"):  # towers keep their attention
            if getattr(near.config, part, None) is not None:
                getattr(near.config, part)._attn_implementation = "sdpa"
        for number, text in enumerate(texts):
            length = len(expected[number])
            patterns = near(**text, output_attentions=True, output_hidden_states=True).attentions
            for layer, pattern in zip(model.stacks[""].layers, patterns, strict=True):
                ours = run["pattern", layer][number, :, :length, :length]
                worst = max(worst, float((ours - pattern[0]).abs().max().nan_to_num(torch.inf)))
    apart = max(
        float((run.logits[number, : len(logits)] - logits).abs().max() / logits.abs().max())
        for number, logits in enumerate(expected)
    )
    alike = apart <= SAME and worst <= SAME
    return f"{'equal' if alike else 'NOT equal'}: logits {apart:.0e}, patterns {worst:.0e}"


def row(name: str) -> str:
    """A row of the table."""
    loaded: list[am.HookedModel] = []
    sense = "sound" if "audio" in KINDS[name].placeholder else "vision"

    def load() -> str:
        loaded.append(am.load(model_of(name)))
        return verdict(loaded[0])

    cells = [name, sentence(load), "–", "–"]
    if loaded:
        cells[2:] = sentence(lambda: compared(loaded[0], name)), sentence(lambda: verdict(getattr(loaded[0], sense)))
    return f"| {' | '.join(cells)} |"


def verdict(model: am.HookedModel) -> str:
    """Whether a model is certified, with the first check that fails."""
    return "certified" if model.certificate.ok else model.certificate.verdict


def main() -> None:
    """Writes the page, or prints rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or sorted(KINDS):
        rows.append(row(name))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        header = "| model type | text | picture or sound | tower |\n| --- | --- | --- | --- |"
        Path(__file__).with_suffix(".md").write_text(f"{ABOUT}\n{header}\n" + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
