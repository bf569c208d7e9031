"""Families of the table: how Falcon counts ALiBi, and gradients."""

import models
import pytest
import reference
import torch
from comparing import close, require_gradient

import attnmech as am

F64 = torch.float64
ALIBI_IN_FALCON = tuple(name for name in models.NEW if name.startswith("falcon_alibi"))


# -- certificate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALIBI_IN_FALCON)
def test_the_certificate_says_that_eager_falcon_counts_alibi_otherwise(name: str) -> None:
    checks = models.hooked(name).certificate.checks
    (remark,) = (check for check in checks if check.name == "implementations")
    assert remark.passed is False and remark.points == ()
    assert remark.statement == "eager and sdpa attention of transformers agree"
    assert "attnmech follows sdpa, which computes what was trained" in remark.detail
    assert "implementations differs" in models.hooked(name).certificate.verdict


# -- Falcon with ALiBi ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "implementation"), [*zip(ALIBI_IN_FALCON, ("eager", "sdpa", "eager"), strict=True)])
def test_falcon_counts_alibi_once_whatever_attention_the_caller_chose(name: str, implementation: str) -> None:
    model = models.in_attention(models.fresh(name), implementation)
    hooked, ids = am.load(model), models.token_ids(name)
    assert model.config._attn_implementation == implementation
    logits = hooked.run(ids).logits
    with torch.no_grad():
        once = models.in_attention(models.fresh(name), "sdpa")(ids).logits
        twice = models.in_attention(models.fresh(name), "eager")(ids).logits
    close(logits, once, 2e-5)
    assert float((once - twice).abs().max()) > 1e-2


def test_falcon_rounds_alibi_to_bfloat16_on_long_texts() -> None:
    model = models.fresh("falcon_alibi_serial")
    ids = torch.randint(3, 55, (1, 600), generator=torch.Generator().manual_seed(0))
    split = am.decompose_scores(am.load(model), ids, layers=[0])
    heads, _, d = reference.heads_of(model)
    slope = torch.tensor(reference.slopes(heads)).bfloat16()
    expected = (slope.float()[:, None] * torch.arange(600)).bfloat16().float() / d**0.5
    close(split.terms["position"][0, 0, :, 0], expected, 1e-6)
    exact = torch.tensor(reference.slopes(heads))[:, None] * torch.arange(600) / d**0.5
    assert float((expected - exact).abs().max()) > 0.1


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("falcon_new", "mlp_out"), ("falcon_alibi_parallel", "attn_out"), ("gemma2", "pattern"), ("gptj", "q"),
        ("qwen3_bias", "q"),
    ],
)  # fmt: skip
def test_gradients_against_finite_differences(name: str, point: str) -> None:
    hooked, ids = models.hooked(name, F64), models.token_ids(name, 1, 5)
    coefficients = torch.randn(5, hooked.n_vocab, generator=torch.Generator().manual_seed(5), dtype=F64)
    # RMSNorms compute in float32, so the step of a difference must not be small.
    step, relative = (1e-6, 1e-5) if reference._place(models.plain(name)).norm_kind == "layer" else (1e-3, 2e-3)
    for layer in range(hooked.n_layers):
        require_gradient(
            hooked, ids, (point, layer), lambda logits: (logits[0] * coefficients).sum(), step=step, relative=relative
        )
