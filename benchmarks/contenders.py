"""Defines the contenders, the ways to run a pass and get its attention; each function makes a step of a model.

Each contender imports its libraries when it is made, so that a process holds no other contender's libraries.
"""

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from shapes import sharing_copy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Pass = Callable[["Tensor"], object]
"""A step on token ids [1 position]; it returns what a user would keep in memory."""

PLAIN: Final = "transformers, plain forward"
FUSED: Final = "transformers, fused attention"
TENSORS: Final = "transformers, output_attentions"
CACHE: Final = "TransformerLens, run_with_cache"
NNSIGHT: Final = "nnsight, attention of all layers"
OURS: Final = "attnmech, focus and updates"
BARE: Final = "attnmech, pass without reducers"

_BLOCK: Final = 256
"""The number of rows in a block of `_bloom_attention`."""


def plain(model: "PreTrainedModel") -> Pass:
    """The forward pass in eager attention, logits only."""
    return _forward(_in_attention(model, "eager"))


def fused(model: "PreTrainedModel") -> Pass:
    """The forward pass in torch's fused attention, which does not return patterns.

    transformers has no fused attention for BLOOM, so its attention runs here in fused blocks (`_bloom_attention`). No
    library ships that, but it is the limit with which statistics beside a fused kernel are compared.
    """
    if model.config.model_type != "bloom":
        return _forward(_in_attention(model, "sdpa"))
    copied = sharing_copy(model)
    blocks: Any = copied.base_model.h
    for block in blocks:
        block.self_attention.forward = MethodType(_bloom_attention, block.self_attention)
    return _forward(copied)


def output_attentions(model: "PreTrainedModel") -> Pass:
    """The forward pass that returns every pattern and every state of the stream."""
    return _forward(_in_attention(model, "eager"), output_attentions=True, output_hidden_states=True)


def run_with_cache(model: "PreTrainedModel") -> Pass:
    """TransformerLens's bridge with every hook point kept."""
    import torch
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    # The public constructor asks the hub for a tokenizer; this one accepts a model, which must have eager attention.
    eager = _in_attention(model, "eager")
    bridge = build_bridge_from_module(eager, type(model).__name__, hf_config=eager.config, tokenizer=None)
    return torch.no_grad()(lambda ids: bridge.run_with_cache(ids))


def nnsight(model: "PreTrainedModel") -> Pass:
    """An nnsight trace that saves the pattern of every layer, from the attention modules' own outputs."""
    import torch
    from nnsight import NNsight  # type: ignore[import-untyped]

    wrapped: Any = NNsight(_in_attention(model, "eager"))

    @torch.no_grad()
    def step(ids: "Tensor") -> object:
        # nnsight runs the block below from its source text, so it must be here, in this order.
        with wrapped.trace(ids, use_cache=False):
            patterns = list().save()  # type: ignore[attr-defined]  # noqa: C408
            for attention in _attentions(wrapped):
                patterns.append(attention.output[1])
        return patterns

    return step


def attnmech(model: "PreTrainedModel") -> Pass:
    """One pass for all of attention focus and residual updates."""
    import attnmech as am

    hooked = am.load(model)
    return lambda ids: am.stream(
        hooked, ids, [am.results.AttentionFocus.reducer(), am.results.ResidualUpdates.reducer()]
    )


def attnmech_bare(model: "PreTrainedModel") -> Pass:
    """The pass through attnmech's attention without observers."""
    import attnmech as am

    hooked = am.load(model)
    return lambda ids: hooked.forward(hooked.encode(ids))


CONTENDERS: Final[dict[str, Callable[["PreTrainedModel"], Pass]]] = {
    PLAIN: plain,
    FUSED: fused,
    TENSORS: output_attentions,
    CACHE: run_with_cache,
    NNSIGHT: nnsight,
    OURS: attnmech,
    BARE: attnmech_bare,
}

PEERS: Final = (TENSORS, CACHE, NNSIGHT)
"""The contenders that return patterns."""
NEEDS: Final = {NNSIGHT: "nnsight"}
"""The module that a contender needs in addition to attnmech's dependencies."""


def _in_attention(model: "PreTrainedModel", implementation: str) -> "PreTrainedModel":
    copied = sharing_copy(model)
    copied.set_attn_implementation(implementation)
    return copied


def _forward(model: "PreTrainedModel", **options: bool) -> Pass:
    import torch

    return torch.no_grad()(lambda ids: model(ids, use_cache=False, **options))


def _attentions(wrapped: Any) -> list[Any]:
    if hasattr(wrapped, "model"):
        return [layer.self_attn for layer in wrapped.model.layers]
    return [block.self_attention if hasattr(block, "self_attention") else block.attn for block in wrapped.transformer.h]


def _bloom_attention(
    self: Any, hidden_states: "Tensor", residual: "Tensor", alibi: "Tensor", attention_mask: object, **_: object
) -> "tuple[Tensor, None]":
    """Replaces the `forward` of BLOOM's attention on one unpadded text: blocks of rows, with keys up to the block's
    end.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = self._reshape(self.query_key_value(hidden_states))
    slopes_by_key = alibi.view(1, self.num_heads, 1, -1)
    blocks = []
    for start in range(0, q.shape[2], _BLOCK):
        stop = min(start + _BLOCK, q.shape[2])
        hidden = torch.ones(stop - start, stop, dtype=torch.bool).triu(start + 1)
        bias = slopes_by_key[..., :stop].masked_fill(hidden, -torch.inf)
        blocks.append(
            scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], attn_mask=bias, scale=self.inv_norm_factor
            )
        )
    z = torch.cat(blocks, dim=2).transpose(1, 2).flatten(2)
    return self.dense(z) + residual, None
