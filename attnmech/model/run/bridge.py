"""Builds TransformerLens's own view of a model, the `TransformerBridge`, without network, on a copy."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ...basics.messages import first_line
from ...errors import UnsupportedModelError
from ..structure.copies import copy_of, use_attention

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def build_bridge(original: PreTrainedModel, tokenizer: Any) -> "TransformerBridge":
    """A bridge on a new copy of the model, with shared parameters and eager attention, so that all hooks fire."""
    # TransformerLens is imported only when a bridge is requested.
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    copied = use_attention(copy_of(original), "eager")
    name = type(original).__name__
    try:
        # TransformerLens initialises layers before filling them; this must not advance the caller's random generator.
        with torch.random.fork_rng(devices=[]):
            return build_bridge_from_module(copied, name, hf_config=copied.config, tokenizer=_own_tokenizer(tokenizer))
    except Exception as error:
        raise UnsupportedModelError(f"TransformerLens has no bridge for {name}: {first_line(error)}") from error


def _own_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    own = copy.deepcopy(tokenizer)
    # With these set, TransformerLens uses this tokenizer unchanged, and does not look it up on the hub.
    own.init_kwargs = {"name_or_path": "", **own.init_kwargs, "add_bos_token": True}
    return own


class Bridges:
    """The bridges of one model: the one that the user sees, and those made for one call."""

    def __init__(self, original: PreTrainedModel, tokenizer: Any) -> None:
        self._original, self._tokenizer = original, tokenizer
        self._building = Lock()

    @cached_property
    def first(self) -> "TransformerBridge":
        return self._build()

    @contextmanager
    def passing(self) -> Iterator["TransformerBridge"]:
        """The user's bridge, or a bridge made for this call.

        The modules of a bridge refer to each other. A bridge made for one call is therefore emptied: otherwise the
        weights that it shares, and its copies of fused weights, would stay in memory until Python collects reference
        cycles.
        """
        if "first" in vars(self):
            yield self.first
            return
        bridge = self._build()
        try:
            yield bridge
        finally:
            for part in [*bridge.modules(), *bridge.original_model.modules()]:
                vars(part).clear()

    def _build(self) -> "TransformerBridge":
        with self._building:
            return build_bridge(self._original, self._tokenizer)
