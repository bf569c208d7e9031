"""Models whose last layers use the keys and values of earlier layers are refused with that reason."""

from typing import Any

import pytest
import transformers

import attnmech as am
from attnmech.errors import UnsupportedModelError


def sharing(family: str, shared: int) -> Any:
    """A small model of a family, whose last layers may share keys and values."""
    more = {
        "Gemma3n": {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
        "Gemma4": {"global_head_dim": 8},
    }[family]
    config = getattr(transformers, f"{family}TextConfig")(
        vocab_size=47, hidden_size=32, intermediate_size=34, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=47,
        num_kv_shared_layers=shared, layer_types=["sliding_attention", "full_attention"] * 2, **more,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_layers_that_share_keys_and_values_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="supported: its last 2 layers have no W_K and W_V of their own"):
        am.load(sharing(family, 2))


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_without_shared_layers_they_are_read(family: str) -> None:
    assert am.load(sharing(family, 0)).certificate.ok
