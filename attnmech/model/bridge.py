"""TransformerLens's own view of a model: the `TransformerBridge`, built with no network and on a copy."""

import copy
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError, first_line
from .hooked import copy_of, use_attention


def build_bridge(original: PreTrainedModel, tokenizer: Any) -> TransformerBridge:
    """A bridge on a further copy that shares the parameters, in eager attention so that its hooks fire."""
    copied = use_attention(copy_of(original), "eager")
    name = type(original).__name__
    try:
        # TransformerLens makes layers and then fills them: that must not move the caller's random numbers.
        with torch.random.fork_rng(devices=[]):
            return build_bridge_from_module(copied, name, hf_config=copied.config, tokenizer=_own_tokenizer(tokenizer))
    except Exception as error:
        raise UnsupportedModelError(f"TransformerLens has no bridge for {name}: {first_line(error)}") from error


def _own_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    own = copy.deepcopy(tokenizer)
    # With these set, TransformerLens takes the tokenizer as it is, and does not look for its name on the hub.
    own.init_kwargs = {"name_or_path": "", **own.init_kwargs, "add_bos_token": True}
    return own
