"""Manages the TransformerLens bridges of a model: a bridge has one key-value cache, so two threads need two bridges."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


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
    def one(self) -> Iterator["TransformerBridge"]:
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
        """As `bridge.continued`, with a bridge that no other call uses."""
        from .bridge import continued

        with self.one() as bridge:
            return continued(bridge, ids, count, options)

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
        # TransformerLens is imported only when a bridge is requested.
        from .bridge import build_bridge

        with self._building:
            return build_bridge(self._original, self._tokenizer)
