"""Families of the table: absent points, frozen norms of queries and keys, and how Falcon counts ALiBi."""

import models
import pytest
import reference
import torch
from comparing import close, require_gradient

import attnmech as am
from attnmech.errors import MissingPointError

F64 = torch.float64
NAMES = tuple(models.NEW)
ALIBI_IN_FALCON = tuple(name for name in NAMES if name.startswith("falcon_alibi"))
WITH_ONE_STEP = {
    "falcon_alibi_parallel", "falcon_alibi_multi_query", "falcon_multi_query", "falcon_new", "falcon_new_one_norm",
    "gpt_neox", "gptj", "gptj_full",
}  # fmt: skip
ROTARY = {
    name for name in NAMES
    if name.startswith(("falcon_multi", "falcon_rot", "falcon_new", "gpt", "mistral", "qwen", "gemma"))
}  # fmt: skip
LENGTH = 7


# -- certificate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALIBI_IN_FALCON)
def test_the_certificate_says_that_eager_falcon_counts_alibi_otherwise(name: str) -> None:
    checks = models.hooked(name).certificate.checks
    (remark,) = (check for check in checks if check.name == "implementations")
    assert remark.passed is False and remark.points == ()
    assert remark.statement == "eager and sdpa attention of transformers agree"
    assert "attnmech follows sdpa, which computes what was trained" in remark.detail
    assert "implementations differs" in models.hooked(name).certificate.verdict


# -- ledger -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_bias"])
def test_with_the_scales_of_qk_norm_frozen_the_terms_are_linear_in_what_comes_in(name: str) -> None:
    model, inputs = models.plain(name, F64), models.padded(name)
    split = am.decompose_scores(models.hooked(name, F64), inputs)
    acts = models.hooked(name, F64).run(inputs, points=["q", "k_rot", "attn_in"])
    for layer in range(2):
        w = reference.layer_weights(model, layer)
        gamma = model.state_dict()[f"model.layers.{layer}.self_attn.q_norm.weight"]
        q = acts["q", layer]
        # The norm's formula in float64; the model computes it in float32.
        frozen = gamma / (q.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        turned = reference.turns(model, LENGTH, F64)
        assert turned is not None
        for h in range(model.config.num_attention_heads):
            part = acts["attn_in", layer][0] @ w.W_Q[h] * frozen[0, :, h]
            rotated = torch.stack([row @ turned[p] for p, row in enumerate(part)])
            kv = h // (model.config.num_attention_heads // model.config.num_key_value_heads)
            whole = rotated @ acts["k_rot", layer][0, :, kv].T * reference.scale(model)
            ours = split.terms["query_key"][0, layer, h]
            if "query_bias" in split.terms:
                ours = ours + split.terms["query_bias"][0, layer, h]
            close(ours, whole, 1e-6)


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


# -- points --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_points_that_a_family_lacks_say_why(name: str) -> None:
    points = models.hooked(name).points
    absent = {point: about.absent for point, about in points.items() if about.absent is not None}
    expected = {"gate", "latent", "mixer_out"} | ({"resid_mid"} if name in WITH_ONE_STEP else set())
    expected |= set() if name in ROTARY else {"q_rot", "k_rot"}
    assert set(absent) == expected
    if name in WITH_ONE_STEP:
        assert absent["resid_mid"].endswith("adds attention and MLP to the stream in one step")
        with pytest.raises(MissingPointError, match=r"has no point 'resid_mid': .* in one step"):
            models.hooked(name).run(models.token_ids(name), points=["resid_mid"])


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
