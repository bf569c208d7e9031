"""Reads a decoder block: its cross-attention, and the rest of the block around both attentions.

Cross-attention reads the stream between self-attention and MLP, x' = x + attn_out or the norm of that, and adds to it.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from ..parts.modules import KEY_STATES
from .architecture import Architecture
from .block_structure import BlockReader, UnreadableError
from .factors import Factors
from .traced import Attended, Call, same


class CrossReader(BlockReader):
    """Reads cross-attention as if it were a separate block.

    `calls` are the calls of the decoder's block; `start.within` is the path of the cross-attention in that block.
    """

    def __init__(self, start: Architecture, attended: Attended, calls: Sequence[Call], factors: Factors) -> None:
        path = f"{start.within}."
        own = [replace(call, path="") for call in calls if call.path == start.within]
        own += [replace(call, path=call.path[len(path) :]) for call in calls if call.path.startswith(path)]
        self.call = own[0]
        """The call of the cross-attention."""
        self.states = _states(own[0], attended)
        """The tensor from which keys and values are made."""
        super().__init__(start, attended, own, factors)

    def _attention(self, plan: Architecture) -> Architecture:
        heads, d_head = self._attended.q.shape[2:]
        q = self._source("q", self._attended.q)
        self._length, self._attn_in = self.states.shape[1], self.states
        k, v = self._source("k", self._attended.k), self._source("v", self._attended.v)
        if any(source.norm is not None or source.latent is not None for source in (q, k, v)):
            raise UnreadableError("its cross-attention has norms or latents of queries, keys or values")
        rotary, scale = self._rotary(q, k)
        if rotary is not None:
            raise UnreadableError("its cross-attention rotates queries and keys")
        self._length, self._attn_in = self._attended.q.shape[1], self._stream
        query_scale = self._factors.named(q.factor / scale, d_head)
        bias = self._attended.options.get("position_bias")
        plan = replace(plan, n_heads=heads, query_scale=query_scale, causal=False)
        plan = replace(plan, positioned=bias is None or bool(bias.any()))
        return self._with_layout(plan, q, k, v)

    def _around(self, plan: Architecture) -> Architecture:
        out = self._out()
        return replace(plan, out=out.path, attn_out=out.path, gate=self._gate(out))


class DecoderReader(BlockReader):
    """Reads self-attention, norms, sums and MLP of a block; `cross` has read the cross-attention between them."""

    def __init__(
        self, start: Architecture, attended: Attended, calls: Sequence[Call], factors: Factors, cross: CrossReader
    ) -> None:
        self._cross = cross
        super().__init__(start, attended, calls, factors)

    def _ending(self, plan: Architecture, norm: Call, later: Sequence[Call]) -> Architecture:
        """Adds the end of the block: cross-attention, MLP and, in post-norm blocks, the norm after each."""
        entering, normed = norm.input, norm.made[0] if norm.made else None
        cross, plan = self._cross.call, replace(plan, interposed="cross")
        crossed = cross.made[0]
        if entering is None or normed is None or not same(normed, cross.input):
            raise UnreadableError("its cross-attention does not read a norm of the stream after self-attention")
        for between in later:
            read = between.input
            if between.order < cross.order or read is None or read.shape != normed.shape:
                continue
            fit = self._sums.fitted(read, normed, [crossed])
            if fit is not None and fit.factors[0] == 1:
                plan = replace(plan, interposed_norm=between.path)
                return self._with_mlp(plan, normed + crossed, between.made[0], between.order, later)
        return self._with_mlp(plan, entering + crossed, None, cross.order, later)


def _states(own: Call, attended: Attended) -> Float[Tensor, "batch key features"]:
    for name in KEY_STATES:
        states = own.kwargs.get(name)
        if isinstance(states, Tensor) and states.shape[:2] == attended.k.shape[:2]:
            return states.detach().clone()
    raise UnreadableError(f"its cross-attention does not take the encoder's states as {' or '.join(KEY_STATES)}")
