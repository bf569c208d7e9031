"""A tiny random model of any type in transformers' auto classes, by one recipe: no two axes of one length."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
import transformers
from models import randomised
from transformers.models.auto import modeling_auto

LISTS: Final = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
"""The auto classes whose types the census builds."""

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
               "moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "num_selected_experts", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token"),
    "head_dim": ("head_dim", "swa_head_dim"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "vocab": ("vocab_size", "vocab_size_per_layer_input"),
    "rope": ("qk_rope_head_dim", "rotary_dim"),
    "nope": ("qk_nope_head_dim",),
    "value": ("v_head_dim",),
    "query_rank": ("q_lora_rank",),
    "key_rank": ("kv_lora_rank",),
}  # fmt: skip

ONE: Final[Mapping[str, int]] = {
    "hidden": 48, "heads": 6, "kv": 2, "layers": 4, "inner": 68, "expert": 36, "experts": 5, "chosen": 2,
    "head_dim": 16, "positions": 128, "vocab": 97, "rope": 8, "nope": 12, "value": 20, "query_rank": 28, "key_rank": 24,
}  # fmt: skip
OTHER: Final[Mapping[str, int]] = {
    "hidden": 40, "heads": 4, "kv": 2, "layers": 4, "inner": 52, "expert": 28, "experts": 6, "chosen": 2,
    "head_dim": 12, "positions": 120, "vocab": 89, "rope": 4, "nope": 8, "value": 16, "query_rank": 36, "key_rank": 20,
}  # fmt: skip
"""Another choice of sizes, to see that no verdict depends on one."""

_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id",
                  "cls_token_id", "unk_token_id", "mask_token_id", "forced_eos_token_id", "boundary_token_id")  # fmt: skip

_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    # What the general recipe cannot know of single types: sizes that must fit each other.
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "deepseek_v2": {"num_key_value_heads": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 6, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"num_key_value_heads": 6, "n_group": 1, "topk_group": 1},
    "minicpm3": {"num_key_value_heads": 6},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5},
    "gptj": {"rotary_dim": 4},
    "helium": {"head_dim": 8},
    "esm": {"vocab_size": 97, "mask_token_id": 5, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": 6},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"num_key_value_heads": 2},
    "bamba": {"mamba_n_heads": 6, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_n_heads": 6, "mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def config_of(kind: str, sizes: Mapping[str, int] = ONE) -> Any:
    """A small config of a model type: its defaults, with every size that the recipe knows made small."""
    made = transformers.CONFIG_MAPPING[kind]
    return made(**_options(made, sizes) | dict(_OWN.get(kind, {})))


def _options(made: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    defaults = made()
    stored = defaults.to_dict()
    there = {name: _value(defaults, name) for name in {*dir(defaults), *stored}}
    found: dict[str, Any] = {}
    for size, names in SIZES.items():
        for name in names:
            none = name in stored and there.get(name) is None and size == "head_dim"
            if none or (isinstance(there.get(name), int) and not isinstance(there[name], bool)):
                found[_as_given(made, name)] = sizes[size]
    for place, name in enumerate(_TOKENS):
        if there.get(name) is not None:
            given = there[name]
            found[name] = [place + 1] if isinstance(given, list) else place + 1
    for name, part in (getattr(made, "sub_configs", None) or {}).items():
        if hasattr(part, "model_type") and part.model_type in transformers.CONFIG_MAPPING:
            found[name] = _options(part, sizes)
    return found


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # an attribute that differs by layer has no one value
        return None


def _as_given(made: Any, name: str) -> str:
    """The name by which the config stores an attribute (`attribute_map`)."""
    return (getattr(made, "attribute_map", None) or {}).get(name, name)


@cache
def kinds() -> dict[str, str]:
    """Every model type of the auto classes with the class that is built: causal first."""
    found: dict[str, str] = {}
    for names in LISTS.values():
        for kind, name in names.items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return found


def model_of(kind: str, sizes: Mapping[str, int] = ONE, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a type with every parameter random."""
    torch.manual_seed(seed)
    config = config_of(kind, sizes)
    made = getattr(transformers, kinds()[kind])
    return randomised(made._from_config(config, dtype=torch.float32), dtype=dtype, seed=seed)
