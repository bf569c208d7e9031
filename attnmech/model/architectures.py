"""All differences between architectures: one table of where things stand and how the block is built.

Adding an architecture is one entry here and one line in the tests' list. Everything else in attnmech reads
this table and never asks which architecture it has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from .attention import BloomAttention
from .position import rotate_halves
from .weights import Fused, Separate


@dataclass(frozen=True)
class Architecture:
    """Where one family of models keeps its parts, and how its blocks put them together.

    Paths are dotted. `blocks` and `embed_norm` start at the base model; `attention`, `out`, `attn_out`,
    `attn_norm`, `mid_norm`, `mlp_out` and `post_norm` at the block; those of `qkv` at the attention module.
    """

    name: str
    blocks: str
    attention: str
    """The module that is given `attn_in`."""
    qkv: Fused | Separate
    out: str
    """The projection whose output is `attn_raw`."""
    attn_out: str
    """The module whose output is added to the stream."""
    mid_norm: str | None
    """The norm whose input is `resid_mid`."""
    mlp_out: str
    """The module whose output the MLP adds to the stream."""
    norm: Literal["pre", "post"]
    """Whether norms stand before attention and MLP, or after the sums."""
    attn_norm: str | None = None
    """Pre-norm only: the norm whose output is `attn_in`."""
    post_norm: str | None = None
    """Post-norm only: the norm whose output is `resid_post`."""
    embed_norm: str | None = None
    position: Literal["alibi", "rotary", "learned"] = "learned"
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    own_attention: Callable[[nn.Module], nn.Module] | None = None
    """Replaces an attention module that does not go through transformers' attention interface."""
    position_limit: str | None = None
    """The entry of the config that says how many positions were learned; None where any number works."""
    causal: Callable[[PreTrainedConfig], bool] = lambda config: True
    refuses: Callable[[PreTrainedConfig], str | None] = lambda config: None
    """Why a model of this family cannot be taken, from its config; None where it can."""


def _bloom_refuses(config: PreTrainedConfig) -> str | None:
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        return "apply_residual_connection_post_layernorm=True (the stream itself is normalised in every block)"
    return None


def _cross_attention_refused(config: PreTrainedConfig) -> str | None:
    if getattr(config, "add_cross_attention", False):
        return "add_cross_attention=True (cross-attention to another model's states)"
    return None


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "bloom": Architecture(
        name="BLOOM",
        blocks="h",
        attention="self_attention",
        qkv=Fused("query_key_value", "head qkv d_head"),
        out="self_attention.dense",
        attn_out="self_attention.dense",
        attn_norm="input_layernorm",
        mid_norm="post_attention_layernorm",
        mlp_out="mlp.dense_4h_to_h",
        norm="pre",
        embed_norm="word_embeddings_layernorm",
        position="alibi",
        own_attention=BloomAttention,
        refuses=_bloom_refuses,
    ),
    "gpt2": Architecture(
        name="GPT-2",
        blocks="h",
        attention="attn",
        qkv=Fused("c_attn", "qkv head d_head"),
        out="attn.c_proj",
        attn_out="attn.c_proj",
        attn_norm="ln_1",
        mid_norm="ln_2",
        mlp_out="mlp",
        norm="pre",
        position_limit="n_positions",
        refuses=_cross_attention_refused,
    ),
    "llama": Architecture(
        name="Llama",
        blocks="layers",
        attention="self_attn",
        qkv=Separate("q_proj", "k_proj", "v_proj"),
        out="self_attn.o_proj",
        attn_out="self_attn.o_proj",
        attn_norm="input_layernorm",
        mid_norm="post_attention_layernorm",
        mlp_out="mlp",
        norm="pre",
        position="rotary",
        rotate=rotate_halves,
    ),
    "bert": Architecture(
        name="BERT",
        blocks="encoder.layer",
        attention="attention.self",
        qkv=Separate("query", "key", "value"),
        out="attention.output.dense",
        attn_out="attention.output.dense",
        mid_norm="attention.output.LayerNorm",
        mlp_out="output.dense",
        norm="post",
        post_norm="output.LayerNorm",
        embed_norm="embeddings.LayerNorm",
        position_limit="max_position_embeddings",
        causal=lambda config: bool(getattr(config, "is_decoder", False)),
        refuses=_cross_attention_refused,
    ),
}
"""By transformers' `config.model_type`."""


def architecture_of(model: nn.Module) -> Architecture:
    """The table's entry for a model; `UnsupportedModelError` names what cannot be taken, and why."""
    known = ", ".join(entry.name for entry in ARCHITECTURES.values())
    if not isinstance(model, PreTrainedModel):
        what = "not a transformers model" if _attends(model) else "a model without attention"
        raise UnsupportedModelError(f"expected a transformers model ({known}); got {type(model).__name__}, {what}.")
    entry = ARCHITECTURES.get(model.config.model_type)
    if entry is None:
        what = "which attnmech does not know yet" if _attends(model) else "a model without attention"
        raise UnsupportedModelError(
            f"expected a model of one of these families: {known}; got {type(model).__name__} "
            f"(model_type {model.config.model_type!r}), {what}."
        )
    reason = entry.refuses(model.config)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} with {reason} is not supported.")
    return entry


def _attends(model: nn.Module) -> bool:
    return any("attention" in type(part).__name__.lower() for part in model.modules())


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path; `UnsupportedModelError` where the model is not built as its family is."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"expected {type(root).__name__} to hold a module at {path!r}, as its family does; it has none. "
            "The model has been rebuilt or wrapped: load it as its own class."
        ) from error


def first_tensor(output: Any) -> Tensor:
    """The tensor that a block or attention module returns, alone or at the head of a tuple."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(found, torch.Tensor)
    return found
