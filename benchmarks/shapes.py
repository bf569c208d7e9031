"""Builds models of known shapes with random weights: the cost of a pass does not depend on the values of the
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

N_VOCAB: Final = 8_000
"""A small vocabulary, so that the logits do not outweigh the cost of attention."""


@dataclass(frozen=True)
class Shape:
    """The recipe for a transformers model: its class and the options of its config, under the architecture's own
    names; the config's defaults are the original model's.
    """

    name: str
    title: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: str = ""
    """The config's name for the number of layers."""
    positions: str = ""
    """The config's name for the number of positions, if the architecture limits it."""


def _named(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


SHAPES: Final = _named(
    Shape(
        "bloom", "BLOOM-560m", "BloomForCausalLM",
        {"n_layer": 24, "n_head": 16, "hidden_size": 1024, "vocab_size": N_VOCAB}, "n_layer",
    ),
    Shape(
        "gpt2", "GPT-2-small", "GPT2LMHeadModel",
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": N_VOCAB}, "n_layer", "n_positions",
    ),
    Shape(
        "llama", "Llama, 16 layers, 4 kv heads", "LlamaForCausalLM",
        {
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 1024,
            "intermediate_size": 2816, "vocab_size": N_VOCAB,
        }, "num_hidden_layers", "max_position_embeddings",
    ),
)  # fmt: skip
"""Shapes whose attention is measured."""
WHOLE: Final = _named(
    Shape("gpt2", "GPT-2-small", "GPT2LMHeadModel", positions="n_positions"),
    Shape("t5", "T5-small", "T5ForConditionalGeneration"),
    Shape("vit", "ViT-base, 224 × 224", "ViTForImageClassification"),
    Shape(
        "whisper", "Whisper-tiny", "WhisperForConditionalGeneration",
        {
            "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
            "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 51_864,
        },
    ),
    Shape(
        "1b", "Llama, 1.2 B", "LlamaForCausalLM",
        {
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048,
            "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True,
        }, positions="max_position_embeddings",
    ),
    Shape(
        "8b", "Llama, 8 B", "LlamaForCausalLM",
        {
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            "intermediate_size": 14_336, "vocab_size": 128_256,
        }, positions="max_position_embeddings",
    ),
)  # fmt: skip
"""Shapes of published models, with their vocabularies."""


def build(
    shape: Shape,
    tokens: int | None = None,
    layers: int | None = None,
    *,
    device: "torch.device | str" = "cpu",
    dtype: "torch.dtype | None" = None,
) -> "PreTrainedModel":
    """The model in eval mode, made on its device, with the same weights in every process.

    It has positions for this many tokens and float32 weights, unless these arguments say otherwise.
    """
    import torch
    import transformers

    kind = getattr(transformers, shape.model)
    options = {"bos_token_id": 1, "eos_token_id": 2, **shape.options}
    if shape.positions and tokens is not None:
        options[shape.positions] = tokens
    if layers is not None:
        options[shape.layers] = layers
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype or torch.float32)
    try:
        with torch.device(device):
            model: PreTrainedModel = kind(kind.config_class(**options))
    finally:
        torch.set_default_dtype(before)
    model.eval()  # type: ignore[no-untyped-call]
    model.tie_weights()
    return model


def token_ids(tokens: int, n_vocab: int = N_VOCAB, texts: int = 1) -> "Tensor":
    """Random token ids [text position]."""
    import torch

    return torch.randint(3, n_vocab, (texts, tokens), generator=torch.Generator().manual_seed(tokens))


def sharing_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy of the modules that shares parameters and buffers, for libraries that rewrite a model in place."""
    import copy

    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
