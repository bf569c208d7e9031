"""Builds TransformerLens's own view of a model, the `TransformerBridge`, without network, on a copy.

A bridge has one key-value cache, so two threads need two bridges.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ...basics.arguments import flag, shown
from ...basics.messages import first_line
from ...basics.public import nearest
from ...errors import InputError, UnsupportedModelError
from ..structure.copies import copy_of, use_attention

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_OPTIONS: Final = (
    "stop_at_eos", "eos_token_id", "do_sample", "top_k", "top_p", "temperature", "freq_penalty", "repetition_penalty",
    "use_past_kv_cache", "verbose", "stop_strings", "stopping_criteria",
)  # fmt: skip
"""The sampling options of the bridge's `generate`; the bridge's other options change inputs or outputs."""


def build_bridge(original: PreTrainedModel, tokenizer: Any) -> "TransformerBridge":
    """A bridge on a new copy of the model, which shares the parameters and runs eager attention, so that all hooks
    fire.
    """
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
    """The bridges of one model: the one that the user sees, and spare ones for calls that overlap."""

    def __init__(self, original: PreTrainedModel, tokenizer: Any) -> None:
        self._original, self._tokenizer = original, tokenizer
        self._building, self._taken = Lock(), Lock()
        self._spare: list[TransformerBridge] = []

    @cached_property
    def first(self) -> "TransformerBridge":
        """The bridge that the user sees; a call uses it if no other call does at the time."""
        return self._build()

    @contextmanager
    def _one(self) -> Iterator["TransformerBridge"]:
        """A bridge that no other call uses during the block."""
        if self._taken.acquire(blocking=False):
            try:
                yield self.first
            finally:
                self._taken.release()
            return
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = self._build()
        try:
            yield spare
        finally:
            self._spare.append(spare)

    def continued(
        self, ids: Int[Tensor, "batch position"], count: int, options: Mapping[str, Any]
    ) -> Int[Tensor, "batch longer"]:
        """The ids, continued by up to `count` ids by a bridge's `generate`; greedy unless the options have
        do_sample=True.

        Raises `InputError` for unknown options, which the bridge would silently ignore, for options that change inputs
        or outputs, and for invalid values.
        """
        with self._one() as bridge:
            parameters = inspect.signature(bridge.generate).parameters
            known = {name: parameter for name, parameter in parameters.items() if name in _OPTIONS}
            for name, value in options.items():
                if name not in known:
                    raise InputError(
                        f"`generate` has no option `{name}`{nearest(name, known)}. It takes {', '.join(known)}."
                    )
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
