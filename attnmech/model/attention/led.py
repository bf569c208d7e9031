"""Replaces the attention of LED, an encoder-decoder whose encoder has a window and global tokens.

The encoder attends as Longformer does; self-attention and cross-attention of the decoder are BART's, in separate code.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

from ..parts.mask import MaskRule
from .local_global import WindowRule, halve
from .replaced_attention import MvpAttention


class LedDecoderAttention(MvpAttention):
    """Self-attention and cross-attention of LED's decoder, which also return a cache."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: MaskRule | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None, Any]:
        """transformers' signature: returns attn_raw, no weights, and the cache unchanged."""
        return (*super().forward(hidden_states, key_value_states, attention_mask), past_key_values)


def with_halves_in_encoder(base: nn.Module) -> None:
    """Gives each attention of the encoder the projections of both halves, and stops the encoder's padding."""
    encoder: Any = base.encoder
    for layer in encoder.layers:
        halve(layer.self_attn.longformer_self_attn, layer.self_attn.output)
    encoder.forward = partial(_encode, encoder)


def _encode(
    encoder: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    **_: Any,
) -> LEDEncoderBaseModelOutput:
    """transformers' `LEDEncoder.forward`."""
    rule = WindowRule.of_masks(input_ids, attention_mask, global_attention_mask)
    x = encoder.layernorm_embedding(encoder.embed_tokens(input_ids) + encoder.embed_positions(input_ids.shape))
    for layer in encoder.layers:
        x = layer(x, attention_mask=rule)[0]
    return LEDEncoderBaseModelOutput(last_hidden_state=x)
