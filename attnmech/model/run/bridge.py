"""Builds TransformerLens's own view of a model, the `TransformerBridge`, without network, on a copy."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import PreTrainedModel

from ...basics.arguments import flag, shown
from ...basics.messages import first_line
from ...basics.public import nearest
from ...errors import InputError, UnsupportedModelError
from ..structure.copies import copy_of, use_attention

_OPTIONS: Final = (
    "stop_at_eos", "eos_token_id", "do_sample", "top_k", "top_p", "temperature", "freq_penalty", "repetition_penalty",
    "use_past_kv_cache", "verbose", "stop_strings", "stopping_criteria",
)  # fmt: skip
"""The sampling options of the bridge's `generate`; the bridge's other options change inputs or outputs."""


def build_bridge(original: PreTrainedModel, tokenizer: Any) -> TransformerBridge:
    """A bridge on a new copy of the model, which shares the parameters and runs eager attention, so that all hooks
    fire.
    """
    copied = use_attention(copy_of(original), "eager")
    name = type(original).__name__
    try:
        # TransformerLens initialises layers before filling them; this must not advance the caller's random generator.
        with torch.random.fork_rng(devices=[]):
            return build_bridge_from_module(copied, name, hf_config=copied.config, tokenizer=_own_tokenizer(tokenizer))
    except Exception as error:
        raise UnsupportedModelError(f"TransformerLens has no bridge for {name}: {first_line(error)}") from error


def continued(
    bridge: TransformerBridge, ids: Int[Tensor, "batch position"], count: int, options: Mapping[str, Any]
) -> Int[Tensor, "batch longer"]:
    """The ids, continued by up to `count` ids by the bridge's `generate`; greedy unless the options have
    do_sample=True.

    Raises `InputError` for unknown options, which the bridge would silently ignore, for options that change inputs or
    outputs, and for invalid values.
    """
    parameters = inspect.signature(bridge.generate).parameters
    known = {name: parameter for name, parameter in parameters.items() if name in _OPTIONS}
    for name, value in options.items():
        if name not in known:
            raise InputError(f"`generate` has no option `{name}`{nearest(name, known)}. It takes {', '.join(known)}.")
        if known[name].annotation is bool:
            flag(name, value)
    chosen = {"do_sample": False, "verbose": False, **options}
    ends = (getattr(source, "eos_token_id", None) for source in (bridge.cfg, bridge.tokenizer))
    if options.get("eos_token_id") is None and all(end is None for end in ends):
        chosen["stop_at_eos"] = False  # no token ends a text
    try:
        with torch.no_grad():
            longer = bridge.generate(ids, count, **chosen, return_type="tokens")
    except Exception as error:  # options that do not fit together, or values out of range
        settings = ", ".join(f"{name}={shown(value)}" for name, value in options.items()) or "these ids"
        raise InputError(f"TransformerLens cannot generate with {settings}: {first_line(error)}") from error
    assert isinstance(longer, torch.Tensor)
    return longer


def _own_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    own = copy.deepcopy(tokenizer)
    # With these set, TransformerLens uses this tokenizer unchanged, and does not look it up on the hub.
    own.init_kwargs = {"name_or_path": "", **own.init_kwargs, "add_bos_token": True}
    return own
