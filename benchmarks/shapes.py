"""Builds models of known shapes with random weights: the cost of a pass does not depend on the values of the
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

N_VOCAB: Final = 8_000
"""A small vocabulary, so that the logits do not outweigh the cost of attention."""


@dataclass(frozen=True)
class Shape:
    """The recipe for a transformers model: its classes and the options of its config, under the architecture's own
    names.
    """

    name: str
    title: str
    model: str
    config: str
    layers: str
    """The config's name for the number of layers."""
    options: Mapping[str, Any]
    positions: str = ""
    """The config's name for the number of positions, if the architecture limits it."""


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape(
            "bloom", "BLOOM-560m", "BloomForCausalLM", "BloomConfig", "n_layer",
            {"n_layer": 24, "n_head": 16, "hidden_size": 1024},
        ),
        Shape(
            "gpt2", "GPT-2-small", "GPT2LMHeadModel", "GPT2Config", "n_layer",
            {"n_layer": 12, "n_head": 12, "n_embd": 768}, "n_positions",
        ),
        Shape(
            "llama", "Llama, 16 layers, 4 kv heads", "LlamaForCausalLM", "LlamaConfig", "num_hidden_layers",
            {
                "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
                "hidden_size": 1024, "intermediate_size": 2816,
            }, "max_position_embeddings",
        ),
    )
}  # fmt: skip


def build(shape: Shape, tokens: int, layers: int | None = None) -> "PreTrainedModel":
    """The model in float32 and eval mode, with positions for this many tokens, and the same weights in every
    process.
    """
    import torch
    import transformers

    options = {**shape.options, "vocab_size": N_VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    if shape.positions:
        options[shape.positions] = tokens
    if layers is not None:
        options[shape.layers] = layers
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, shape.model)(getattr(transformers, shape.config)(**options))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def token_ids(tokens: int) -> "Tensor":
    """Random token ids [1 position]."""
    import torch

    return torch.randint(3, N_VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def sharing_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy of the modules that shares parameters and buffers, for libraries that rewrite a model in place."""
    import copy

    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
