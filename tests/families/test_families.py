"""Families of the table: the ledger against terms computed from raw weights, and how points fit together."""

from functools import cache
from typing import Any

import models
import pytest
import reference
import torch
from comparing import close, require_gradient
from torch import Tensor

import attnmech as am
from attnmech.errors import MissingPointError

F32, F64 = torch.float32, torch.float64
NAMES = tuple(models.NEW)
DTYPES = {
    name: F32 if number % 2 or name in models.SINGLE_ONLY else F64 for number, name in enumerate(NAMES)
}  # fmt: skip
SIDES = {name: ("right", "left")[number // 2 % 2] for number, name in enumerate(NAMES)}
"""Precision and padding alternate from model to model."""
CASES = list(DTYPES.items())
TURNS = [(name, dtype, SIDES[name]) for name, dtype in CASES]
ALIBI_IN_FALCON = tuple(name for name in NAMES if name.startswith("falcon_alibi"))
WITH_ONE_STEP = {
    "falcon_alibi_parallel", "falcon_alibi_multi_query", "falcon_multi_query", "falcon_new", "falcon_new_one_norm",
    "gpt_neox", "gptj", "gptj_full",
}  # fmt: skip
ROTARY = {
    name for name in NAMES
    if name.startswith(("falcon_multi", "falcon_rot", "falcon_new", "gpt", "mistral", "qwen", "gemma"))
}  # fmt: skip
WINDOWED = ("mistral", "gemma2", "gpt_oss", "gpt_oss_yarn")
LENGTH = 7


def padded(name: str, side: str = "right") -> dict[str, Tensor]:
    """Texts of 7, 5 and 3 tokens; for a window of 3 tokens, of 7 and 5, so that every row sees a real token.

    In float64, transformers' eager attention gives NaN in rows that see none, and in everything above them.
    """
    return models.padded(name, side, batch=2 if name in WINDOWED else 3, length=LENGTH)


@cache
def acts_of(name: str, dtype: torch.dtype, side: str) -> am.results.Activations:
    hooked = models.hooked(name, dtype)
    present = [point for point, about in hooked.points.items() if about.absent is None]
    return hooked.run(padded(name, side), points=present)


@cache
def plain_output(name: str, dtype: torch.dtype, side: str) -> Any:
    model = models.plain(name, dtype)
    with torch.no_grad():
        return model(
            **padded(name, side),
            output_hidden_states=True,
        )


def real_of(name: str, side: str = "right") -> Tensor:
    return padded(name, side)["attention_mask"].bool()


def seen_of(name: str, layer: int, side: str = "right") -> Tensor:
    """Visible pairs of real tokens."""
    mask = padded(name, side)["attention_mask"]
    return reference.visible(models.plain(name), mask, layer) & mask.bool()[:, None, :, None]


def check_of(name: str, check: str, dtype: torch.dtype = F32) -> Any:
    return next(each for each in models.hooked(name, dtype).certificate.checks if each.name == check)


# -- certificate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALIBI_IN_FALCON)
def test_the_certificate_says_that_eager_falcon_counts_alibi_otherwise(name: str) -> None:
    remark = check_of(name, "implementations")
    assert remark.passed is False and remark.points == ()
    assert remark.statement == "eager and sdpa attention of transformers agree"
    assert "attnmech follows sdpa, which computes what was trained" in remark.detail
    assert "implementations differs" in models.hooked(name).certificate.verdict


# -- transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_stream_begins_with_the_embedding_and_is_that_of_plain_transformers(name: str, dtype: torch.dtype) -> None:
    rows = models.plain(name, dtype).get_input_embeddings().weight.detach()[padded(name)["input_ids"]]
    close(acts_of(name, dtype, "right")["embed"], rows * (6.0 if name == "gemma2" else 1.0), 1e-6)
    states, real = plain_output(name, dtype, "right").hidden_states, real_of(name)
    for layer in range(models.hooked(name, dtype).n_layers):
        ours = acts_of(name, dtype, "right")["resid_pre", layer]
        close(ours[real], states[layer][real], 1e-5 if dtype == F32 else 1e-6)


# -- ledger -------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype", "side"), TURNS)
def test_every_term_is_what_the_raw_weights_give(name: str, dtype: torch.dtype, side: str) -> None:
    model, inputs = models.plain(name, dtype), padded(name, side)
    split, acts = am.decompose_scores(models.hooked(name, dtype), inputs), acts_of(name, dtype, side)
    tolerance = 1e-5 if dtype == F32 else 1e-12
    for layer in range(models.hooked(name, dtype).n_layers):
        x = reference.attention_input(model, layer, acts["resid_pre", layer])
        real = real_of(name, side)
        close(acts["attn_in", layer][real], x[real], tolerance)
        expected = reference.terms(model, layer, x, inputs["attention_mask"])
        assert set(split.terms) == set(expected)
        scores = acts["scores", layer]
        keep = seen_of(name, layer, side).expand_as(scores)
        largest = float(scores[keep].abs().max())
        for term, value in expected.items():
            ours = split.terms[term][:, layer].expand_as(value)
            if term == "mask":
                rows = real[:, None, :, None].expand_as(value)
                assert torch.equal(ours[rows], value[rows])
                continue
            # Slopes are computed in float32 in every model, by transformers' own power function.
            close(ours[keep], value[keep], max(tolerance, 1e-6) if term == "position" else tolerance, largest)
        position = {"position": split.terms["position"][:, layer].expand_as(scores)} if "position" in expected else {}
        total = torch.stack([value for term, value in (expected | position).items() if term != "mask"]).sum(0)
        close(scores[keep], total[keep], tolerance)
        assert bool((scores[~seen_of(name, layer, side).expand_as(scores) & real[:, None, :, None]] < -1e30).all())
    relative = split.residual / split.largest.amax(dim=1, keepdim=True)
    assert float(relative.max()) <= tolerance


def test_the_soft_cap_matters_in_these_tests() -> None:
    split = am.decompose_scores(models.hooked("gemma2", DTYPES["gemma2"]), models.padded("gemma2"))
    assert float(split.terms["softcap"].abs().max()) > 0.3


@pytest.mark.parametrize("name", ["bloom6", "falcon_new", "gpt_neox", "opt", "roberta"])
def test_terms_with_the_norm_folded_in(name: str) -> None:
    model, inputs = models.plain(name, F64), models.padded(name, length=5)
    split = am.decompose_scores(models.hooked(name, F64), inputs, fold_norm=True)
    stream = models.hooked(name, F64).run(inputs, points=["resid_pre"])
    for layer in range(models.hooked(name, F64).n_layers):
        x = reference.attention_input(model, layer, stream["resid_pre", layer])
        expected = reference.terms(model, layer, x, inputs["attention_mask"], fold_norm=True)
        assert set(split.terms) == set(expected)
        for term in ("query_key", "key_bias", "query_bias", "constant"):
            close(split.terms[term][:, layer].expand_as(expected[term]), expected[term], 1e-12)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_bias"])
def test_with_the_scales_of_qk_norm_frozen_the_terms_are_linear_in_what_comes_in(name: str) -> None:
    model, inputs = models.plain(name, F64), models.padded(name)
    split = am.decompose_scores(models.hooked(name, F64), inputs)
    acts = acts_of(name, F64, "right")
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


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_points_that_a_family_lacks_say_why(name: str, dtype: torch.dtype) -> None:
    points = models.hooked(name, dtype).points
    absent = {point: about.absent for point, about in points.items() if about.absent is not None}
    expected = {"gate", "latent", "mixer_out"} | ({"resid_mid"} if name in WITH_ONE_STEP else set())
    expected |= set() if name in ROTARY else {"q_rot", "k_rot"}
    assert set(absent) == expected
    if name in WITH_ONE_STEP:
        assert absent["resid_mid"].endswith("adds attention and MLP to the stream in one step")
        with pytest.raises(MissingPointError, match=r"has no point 'resid_mid': .* in one step"):
            models.hooked(name, dtype).run(models.token_ids(name), points=["resid_mid"])


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_points_fit_together(name: str, dtype: torch.dtype) -> None:
    hooked, acts, model = models.hooked(name, dtype), acts_of(name, dtype, "right"), models.plain(name, dtype)
    tolerance, real = 2e-5 if dtype == F32 else 1e-12, real_of(name)
    heads, kv, _ = reference.heads_of(model)
    for layer in range(hooked.n_layers):
        at = {point: acts[point, layer] for point, about in hooked.points.items()
              if about.absent is None and point not in ("embed", "logits")}  # fmt: skip
        w = reference.layer_weights(model, layer)
        for point, W, b in (("q", w.W_Q, w.b_Q), ("k", w.W_K, w.b_K), ("v", w.W_V, w.b_V)):
            close(at[point][real], reference.project(at["attn_in"], W, b)[real], tolerance)
        z = torch.stack([at["pattern"][:, h] @ at["v"][:, :, h // (heads // kv)] for h in range(heads)], dim=2)
        close(at["z"][real], z[real], tolerance)
        result = torch.stack([at["z"][:, :, h] @ w.W_O[h] for h in range(heads)], dim=2)
        close(at["result"][real], result[real], tolerance)
        raw = result.sum(2) if w.b_O is None else result.sum(2) + w.b_O
        close(at["attn_raw"][real], raw[real], tolerance)
        out = raw
        if name == "gemma2":
            gamma = model.state_dict()[f"model.layers.{layer}.post_attention_layernorm.weight"]
            out = (reference._rms(at["attn_raw"], 1e-6) * (1 + gamma.float())).to(dtype)
            assert float((out - raw).abs().max()) > 0.1
        close(at["attn_out"][real], out[real], tolerance)
        if "resid_mid" in at:
            close(at["resid_mid"][real], (at["resid_pre"] + at["attn_out"])[real], tolerance)
            if "berta" not in name and name != "opt_post":
                close(at["resid_post"][real], (at["resid_mid"] + at["mlp_out"])[real], tolerance)
        else:
            close(at["resid_post"][real], (at["resid_pre"] + at["attn_out"] + at["mlp_out"])[real], tolerance)


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
