"""A tiny random model of any type in transformers' auto classes, by one recipe; all axes have different lengths."""

from collections.abc import Mapping
from functools import cache, reduce
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from models import randomised
from transformers.models.auto import modeling_auto

LISTS: Final = {
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
"""The auto classes whose types the census builds."""

SENSES: Final = {
    "images": (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES,
    ),
    "sound": (
        modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    ),
}  # fmt: skip
"""The auto classes of images and of sound, whose types the census counts beside those of text."""

MERGED: Final = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
)
"""The classes, by type, of models that read images or sound as tokens among those of a text."""

SIGNALS: Final[Mapping[str, Any]] = {
    "image_size": 64, "patch_size": 16, "max_length": 42, "num_mel_bins": 28, "max_source_positions": 22,
    "conv_dim": (20, 28), "conv_kernel": (10, 4), "conv_stride": (5, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4, "use_mid_position_embeddings": False,
}  # fmt: skip
"""The sizes of images, recordings and their patches."""

SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim", "embedding_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
              "decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
              "num_decoder_heads"),
    "kv": ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
               "num_decoder_layers", "num_encoder_layers"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
              "ffn_hidden_size", "shared_intermediate_size", "d_inner"),
    "expert": ("moe_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size",
               "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "prefix_dense_intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "num_selected_experts", "top_k_experts", "moe_topk", "moe_k",
               "num_experts_per_token"),
    "head_dim": ("head_dim", "swa_head_dim"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "vocab": ("vocab_size", "vocab_size_per_layer_input", "entity_vocab_size"),
    "rope": ("qk_rope_head_dim", "rotary_dim"),
    "nope": ("qk_nope_head_dim",),
    "value": ("v_head_dim",),
    "query_rank": ("q_lora_rank",),
    "key_rank": ("kv_lora_rank",),
    "window": ("sliding_window", "attention_chunk_size"),
}  # fmt: skip

ONE: Final[Mapping[str, int]] = {
    "hidden": 48, "heads": 6, "kv": 2, "layers": 4, "inner": 68, "expert": 36, "experts": 5, "chosen": 2,
    "head_dim": 16, "positions": 128, "vocab": 97, "rope": 8, "nope": 12, "value": 20, "query_rank": 28, "key_rank": 24,
    "window": 110,
}  # fmt: skip
OTHER: Final[Mapping[str, int]] = {
    "hidden": 40, "heads": 4, "kv": 2, "layers": 4, "inner": 52, "expert": 28, "experts": 6, "chosen": 2,
    "head_dim": 24, "positions": 120, "vocab": 89, "rope": 4, "nope": 8, "value": 16, "query_rank": 36, "key_rank": 20,
    "window": 106,
}  # fmt: skip
"""Different sizes, to check that no verdict depends on the choice."""

_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id",
                  "cls_token_id", "unk_token_id", "mask_token_id", "forced_eos_token_id",
                  "boundary_token_id")  # fmt: skip


def _own(kind: str, size: Mapping[str, int]) -> Mapping[str, Any]:
    """Options that the recipe cannot derive: sizes that must fit each other, and defaults for large models only."""
    heads, twice = size["heads"], 2 * size["hidden"]
    one_group = {"n_group": 1, "topk_group": 1}
    latent = one_group | {"num_key_value_heads": heads}
    # T5 does not divide scores by √d: with many dimensions, those of random weights saturate the softmax.
    unscaled = {"d_kv": size["rope"]}
    sound = {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2]}
    alike = {"global_head_dim": size["head_dim"]}
    indexer = {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 12,
    }
    sections = [size["hidden"] // size["heads"] // 2 - 2, 1, 1]
    by_axis = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}
    factorised = {"embedding_size": size["hidden"] - 12}
    mamba = {"mamba_n_heads": heads, "mamba_d_head": twice // heads, "mamba_d_state": 14, "mamba_chunk_size": 16}
    return {
        "albert": factorised,
        "axk1": latent,
        "axk2": latent,
        "bailing_hybrid": latent | {"num_group": 1, "layer_types": ["linear_attention", "full_attention"] * 2},
        "bamba": mamba | {"attn_layer_indices": [1, 3]},
        "beam": one_group,
        "cohere_compass_text": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 5,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
            },
        },
        "codegen": {"n_head": 4, "rotary_dim": 8},
        "deepseek_v2": latent | {"num_experts_per_tok": 2},
        "deepseek_v3": latent | {"n_routed_experts": 4, "first_k_dense_replace": 1},
        "deepseek_v32": latent,
        "dots1": one_group | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "electra": factorised,
        "esmc": {"num_key_value_heads": heads, "head_dim": size["hidden"] // heads},
        "esm": {"vocab_size": size["vocab"], "mask_token_id": 5, "pad_token_id": 1},
        "glm4_moe_lite": latent,
        "glm_moe_dsa": latent,
        "falcon_h1": {"mamba_d_ssm": twice}
        | mamba
        | {"mamba_expand": 2, "key_multiplier": 0.4, "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.7},
        "gemma4": {"text_config": alike},
        "gemma4_text": alike,
        "gemma4_unified": {"text_config": alike},
        "gemma4_unified_text": alike,
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "gpt_neo": {"attention_types": [[["global", "local"], size["layers"] // 2]], "window_size": 5},
        "gptj": {"rotary_dim": 4},
        "granitemoehybrid": mamba | {"layer_types": ["mamba", "attention"] * 2},
        "helium": {"head_dim": size["hidden"] // heads},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
        "kimi_linear": latent
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": heads},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
        "mamba2": {"n_groups": 2, "num_heads": heads, "head_dim": twice // heads},
        "mimo_v2_flash": one_group | {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "minicpm3": {"num_key_value_heads": heads},
        "mt5": unscaled,
        "mobilebert": {"embedding_size": size["hidden"] - 8, "intra_bottleneck_size": 5 * heads},
        "nemotron": {"num_key_value_heads": size["kv"]},
        "nemotron_h": {
            "mamba_num_heads": heads,
            "mamba_head_dim": twice // heads,
            "n_groups": 2,
            "ssm_state_size": 14,
            "chunk_size": 16,
        },
        "qwen4_exp": {"text_config": indexer},
        "qwen4_exp_text": indexer,
        "qwen2_5_omni_thinker": {"text_config": by_axis},
        "qwen2_5_vl": {"text_config": by_axis},
        "qwen2_vl": {"text_config": by_axis},
        "qwen3_next": {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": 14,
            "linear_value_head_dim": size["value"],
        },
        "reformer": {"is_decoder": True, "axial_pos_embds": False},
        "rembert": {"input_embedding_size": size["hidden"] - 12, "output_embedding_size": size["hidden"] + 12},
        "roformer": factorised,
        "switch_transformers": unscaled,
        "t5": unscaled,
        "umt5": unscaled,
        "xglm": {"attention_heads": heads},
        "xmod": {"default_language": "en_XX"},
        "vibevoice_asr": {"acoustic_tokenizer_encoder_config": sound, "semantic_tokenizer_encoder_config": sound},
        "yolos": {"image_size": [64, 96], "num_detection_tokens": 7},
        "youtu": latent,
        "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": heads},
        "zamba2": {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "num_mem_blocks": 1,
            "mamba_ngroups": 2,
            "mamba_d_state": 14,
            "chunk_size": 16,
            "n_mamba_heads": heads,
            "num_key_value_heads": heads,
        },
        "zaya": {"num_experts_per_tok": 1},
    }.get(kind, {})


def config_of(kind: str, sizes: Mapping[str, int] = ONE) -> Any:
    """A small config of a model type: its defaults, with small values for every size that the recipe knows."""
    made = transformers.CONFIG_MAPPING[kind.partition(" (")[0]]
    signals = _signals(made) if kind in senses() else {}
    return made(**_merged(_options(made, sizes) | signals, _own(kind, sizes)))


def _signals(made: Any) -> dict[str, Any]:
    """The recipe's options for images and sound, if the default has a value of the same kind."""
    defaults = made()
    found = {
        name: value
        for name, value in SIGNALS.items()
        if hasattr(defaults, name)
        and isinstance(value, tuple | list) == isinstance(getattr(defaults, name), tuple | list)
    }
    for name in getattr(made, "sub_configs", None) or {}:
        part = getattr(defaults, name, None)
        if name.startswith("vision") and isinstance(part, transformers.PreTrainedConfig):
            found[name] = {"model_type": part.model_type} | _options(type(part), ONE) | _signals(type(part))
    return found


def _merged(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options merged with those of a type, also in the configs of its parts."""
    both = {name for name in own if isinstance(own[name], dict) and isinstance(options.get(name), dict)}
    return {**options, **own, **{name: _merged(options[name], own[name]) for name in both}}


def _options(made: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    defaults = made()
    stored, stored_as = defaults.to_dict(), getattr(made, "attribute_map", None) or {}
    there = {name: _value(defaults, name) for name in {*dir(defaults), *stored}}
    found: dict[str, Any] = {}
    for size, names in SIZES.items():
        for name in names:
            none = name in stored and there.get(name) is None and size == "head_dim"
            whole = isinstance(there.get(name), int) and not isinstance(there[name], bool)
            if (none or whole) and _takes(made, name, sizes[size]):
                found[stored_as.get(name, name)] = sizes[size]
    if "qk_rope_head_dim" in found and there.get("head_dim") == there["qk_rope_head_dim"]:
        found["head_dim"] = sizes["rope"]
    for place, name in enumerate(_TOKENS):
        if there.get(name) is not None:
            found[name] = [place + 1] if isinstance(there[name], list) else place + 1
    for name in getattr(made, "sub_configs", None) or {}:
        if isinstance(part := there.get(name), transformers.PreTrainedConfig):
            found[name] = {"model_type": part.model_type} | _options(type(part), sizes)
    return found


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # an attribute that differs by layer has no single value
        return None


def _takes(made: Any, name: str, value: int) -> bool:
    """Whether an attribute of a config can be set; some are computed from others."""
    try:
        setattr(made(), name, value)
    except (AttributeError, NotImplementedError):
        return False
    return True


@cache
def kinds() -> dict[str, str]:
    """Every model type of the auto classes, with the class to build from the first list that has it."""
    found: dict[str, str] = {}
    for names in LISTS.values():
        for kind, name in names.items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return found


@cache
def senses() -> dict[str, tuple[str, str]]:
    """Every model type of images and sound, with its kind and the class to build."""
    found: dict[str, tuple[str, str]] = {}
    for sense, lists in SENSES.items():
        for kind, name in (pair for names in lists for pair in names.items()):
            label = f"{kind} ({sense})" if kind in kinds() else kind
            found.setdefault(label, (sense, name if isinstance(name, str) else name[0]))
    return found


def class_of(kind: str) -> str:
    return kinds()[kind] if kind in kinds() else senses()[kind][1]


def parameters_of(kind: str, sizes: Mapping[str, int] = ONE) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _made(kind, sizes).parameters())


def model_of(kind: str, sizes: Mapping[str, int] = ONE, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a type with every parameter random."""
    torch.manual_seed(seed)
    return randomised(_made(kind, sizes), dtype=dtype, seed=seed)


def merging(kind: str, sizes: Mapping[str, Any] = MappingProxyType({}), **placeholders: int) -> Any:
    """A model of text with images or sound, whose config has these `sizes` ("vision_config.patch_size") and ids of
    `placeholders`.
    """
    torch.manual_seed(0)
    config = config_of(kind)
    for path, value in {**sizes, **placeholders}.items():
        *parts, name = path.split(".")
        part = reduce(getattr, parts, config)
        assert hasattr(part, name), f"{type(part).__name__} has no {name}"
        setattr(part, name, value)
    return randomised(getattr(transformers, MERGED[kind])._from_config(config, dtype=torch.float32), seed=0)


def albert_groups() -> Any:
    """ALBERT with five layers in two groups of three blocks."""
    config = config_of("albert")
    config.num_hidden_layers, config.num_hidden_groups, config.inner_group_num = 5, 2, 3
    return randomised(transformers.AlbertForMaskedLM(config))


def _made(kind: str, sizes: Mapping[str, int]) -> Any:
    config, made = config_of(kind, sizes), getattr(transformers, class_of(kind))
    if not isinstance(config, made.config_class):
        config = config.get_text_config()
    return made._from_config(config, dtype=torch.float32)
