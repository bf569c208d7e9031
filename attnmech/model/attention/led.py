"""Runs the encoder of LED, which attends within a window and to global tokens, as Longformer does."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

from .local_global import WindowRule, halve


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
