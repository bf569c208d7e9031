"""The TransformerLens bridges of a model. Each holds one key-value cache, so two threads need two."""

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
    """TransformerLens's bridges of one model: the user's, and spare ones for calls that overlap."""

    def __init__(self, original: PreTrainedModel, tokenizer: Any) -> None:
        self._original, self._tokenizer = original, tokenizer
        self._building, self._taken = Lock(), Lock()
        self._spare: list[TransformerBridge] = []

    @cached_property
    def first(self) -> "TransformerBridge":
        """The bridge that a user sees; calls take it if no other call has it."""
        return self._build()

    @contextmanager
    def one(self) -> Iterator["TransformerBridge"]:
        """A bridge for one call."""
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
        """The ids with up to `count` more by a bridge's `generate`; raises what `bridge.continued` raises."""
        from .bridge import continued

        with self.one() as bridge:
            return continued(bridge, ids, count, options)

    @contextmanager
    def passing(self) -> Iterator["TransformerBridge"]:
        """The user's bridge, or one for this call alone.

        TransformerLens's modules refer to each other, so the latter bridge's are emptied: otherwise the weights that it
        shares, and its copies of fused weights, would stay in memory until Python collects reference cycles.
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
        # Loading TransformerLens can wait until a bridge is asked for.
        from .bridge import build_bridge

        with self._building:
            return build_bridge(self._original, self._tokenizer)
