"""ViT: images in, patches as labels."""

from typing import Any

import models
import pytest
import torch
from caching import cached
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError, MissingPointError

F32, F64 = torch.float32, torch.float64


@cached
def vit(dtype: torch.dtype, headless: bool = False) -> Any:
    return models.fresh("vit_headless" if headless else "vit", dtype)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 2, 8, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("headless", [False, True])
def test_every_check_holds(dtype: torch.dtype, headless: bool) -> None:
    model = am.load(vit(dtype, headless))
    assert model.certificate.ok, repr(model.certificate)
    assert {"ledger", "attentions", "streams", "pattern edit"} <= {c.name for c in model.certificate.checks if c.passed}


def test_patches_are_labelled_row_by_row() -> None:
    batch = am.load(vit(F32)).encode(images(1)[0])
    assert batch.tokens == (("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"),)


def test_scores_logits_and_ledger_against_transformers() -> None:
    model, plain = am.load(vit(F64)), vit(F64)
    acts = model.run({"pixel_values": images()}, points=["scores", "pattern", "logits"])
    with torch.no_grad():
        out = plain(images().double(), output_hidden_states=True)
    torch.testing.assert_close(acts.logits, out.logits, rtol=1e-6, atol=1e-6)
    split = am.decompose_scores(model, images())
    for layer in range(2):
        part = plain.vit.layers[layer]
        with torch.no_grad():
            x = part.layernorm_before(out.hidden_states[layer])
            q, k = (w(x).unflatten(-1, (3, 5)).transpose(1, 2) for w in (part.attention.q_proj, part.attention.k_proj))
            expected = q @ k.transpose(-1, -2) / 5**0.5
        torch.testing.assert_close(acts["scores", layer], expected, rtol=1e-6, atol=1e-6)
        total = sum(term[:, layer] for term in split.terms.values())
        torch.testing.assert_close(total, acts["scores", layer])
    assert float(split.residual.max()) < 1e-12


def test_what_cannot_be_read_is_refused_by_name() -> None:
    model = am.load(vit(F32))
    bad: list[tuple[Any, str]] = [
        ("a text", "this model reads images"),
        (torch.arange(5), "floating-point tensor of pixel values"),
        (torch.randn(2, 2, 8, 8), r"\[batch, 2, 8, 12\].*got \(2, 2, 8, 8\)"),
        (torch.randn(0, 2, 8, 12), r"got \(0, 2, 8, 12\)"),
        ({"input_ids": torch.arange(5)}, 'must hold only "pixel_values"'),
    ]
    for given, message in bad:
        with pytest.raises(InputError, match=message):
            model.run(given)
    with pytest.raises(InputError, match="bos is only for texts"):
        model.run(images(), bos=True)
    with pytest.raises(MissingPointError, match="an image has no tokens"):
        model.run(images(), points=["embed"])


def test_a_report_shows_an_image() -> None:
    report = am.report(am.load(vit(F32)), images(1))
    assert "1,2" in report.to_html()
