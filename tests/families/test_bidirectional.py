"""Decoders run in both directions, large scores and layer scales are proven as any other model's."""

from typing import Any

import models
import pytest
import tiny
import torch
import transformers

import attnmech as am
from attnmech.errors import CertificateError
from attnmech.model.proof.certify import certify_with
from attnmech.model.proof.probe import Passes

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "image_size": [32, 32], "patch_size": [8, 8],
}  # fmt: skip


def _both_ways(kind: str, attention: str = "sdpa") -> Any:
    config = tiny.config_of(kind)
    config.get_text_config().use_bidirectional_attention = True
    made: Any = getattr(transformers, tiny.MERGED.get(kind) or tiny.class_of(kind))
    return models.randomised(made._from_config(config, dtype=torch.float32, attn_implementation=attention), seed=0)


@pytest.mark.parametrize(
    ("kind", "attention", "causal"), [("gemma", "sdpa", False), ("paligemma", "sdpa", False), ("gemma", "eager", True)]
)
def test_a_text_is_read_as_transformers_reads_it_alone(kind: str, attention: str, causal: bool) -> None:
    """Without padding, sdpa is given no mask and attends in both directions; with padding, its mask is causal."""
    plain = _both_ways(kind, attention)
    ids = torch.randint(10, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    model, lengths = am.load(plain), (12, 7)
    assert model.certificate.ok and model.causal is causal
    logits = model.run([row[:length] for row, length in zip(ids, lengths, strict=True)]).logits
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = plain(ids[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, :length], alone, atol=1e-4, rtol=0)
    assert "is_causal" not in vars(plain.config.get_text_config())


@pytest.mark.parametrize("kind", ["gemma3", "stablelm"])
def test_a_model_whose_mask_depends_on_padding_is_refused(kind: str) -> None:
    plain = _both_ways("gemma3") if kind == "gemma3" else tiny.model_of(kind)
    plain.config.is_causal = kind == "gemma3"
    with pytest.warns(UserWarning, match="transformers with a text alone"):
        model = am.load(plain)
    with pytest.raises(CertificateError, match="padding"):
        model.run(torch.tensor([[11, 12, 13]]))


@pytest.mark.parametrize(("size", "dtype"), [(10.0, torch.float64), (35.0, torch.float32), (100.0, torch.float64)])
def test_a_head_with_large_scores_is_certified(size: float, dtype: torch.dtype) -> None:
    """Eager attention rounds scores of about -10 size² / 8 to float32, also in a float64 model."""
    plain = tiny.model_of("opt", dtype=dtype)
    attention = plain.model.decoder.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.bias[:8] += 2 * size
        attention.k_proj.bias[:8] -= 2 * size
    assert am.load(plain).certificate.ok


@pytest.mark.parametrize(
    ("kind", "dtype", "attention", "seed", "layer"),
    [
        ("gpt_neox", torch.float64, "sdpa", 5, 2),
        ("gpt_neox", torch.float64, "eager", 5, 2),
        ("llama", torch.float32, "sdpa", 1, 1),
    ],
)
def test_rounding_of_large_scores_is_not_charged_to_later_layers(
    kind: str, dtype: torch.dtype, attention: str, seed: int, layer: int
) -> None:
    """Two keys share a row's attention at scores of 1e4 to 1e5; the rounding of their scores moves later patterns."""
    plain = models.in_attention(tiny.model_of(kind, dtype=dtype, seed=seed), attention)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            if f"layers.{layer}." in name and any(part in name for part in ("query_key_value", "q_proj", "k_proj")):
                value.mul_(100)
    model = am.load(plain)
    assert model.certificate.ok
    passes = Passes(model)
    passes.eager.attentions[layer + 1][0, :, :, 0] += 1e-3
    assert [check.name for check in certify_with(passes).failed] == ["attentions"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["BeitModel", "InternVLVisionModel"])
def test_a_layer_scale_made_in_float32_is_read_exactly(kind: str, dtype: torch.dtype) -> None:
    made: Any = getattr(transformers, kind)
    square = {} if kind.startswith("Intern") else {"image_size": 32, "patch_size": 8}
    config = made.config_class(**SIZES | square)
    torch.manual_seed(0)
    model = am.load(made(config).to(dtype).eval())
    assert model.certificate.ok
    if dtype == torch.float64:
        assert model.architecture.attn_scale == float(torch.tensor(0.1))
