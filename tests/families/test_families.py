"""Each family against transformers, and its ledger against terms computed from raw weights."""

import copy
from functools import cache
from typing import Any

import models
import pytest
import reference
import torch
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
BIASED = {
    "bloom6", "falcon_alibi_serial", "falcon_multi_query", "falcon_rotary_serial", "falcon_new", "opt", "opt_post",
    "gpt_neox", "qwen2", "qwen3_bias", "gpt_oss", "gpt_oss_yarn", "roberta", "xlm_roberta", "deberta_v2",
    "deberta_v2_own_projections",
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
            output_attentions=name not in ALIBI_IN_FALCON,
        )


def real_of(name: str, side: str = "right") -> Tensor:
    return padded(name, side)["attention_mask"].bool()


def seen_of(name: str, layer: int, side: str = "right") -> Tensor:
    """Visible pairs of real tokens."""
    mask = padded(name, side)["attention_mask"]
    return reference.visible(models.plain(name), mask, layer) & mask.bool()[:, None, :, None]


def close(ours: Tensor, theirs: Tensor, tolerance: float, at_least: float = 0.0) -> None:
    assert not theirs.isnan().any()
    size = max(float(theirs.abs().max()), at_least, 1e-30)
    difference = float((ours - theirs).abs().max())
    assert difference <= tolerance * size, f"off by {difference:.2e}, largest {size:.2e}"


def check_of(name: str, check: str, dtype: torch.dtype = F32) -> Any:
    return next(each for each in models.hooked(name, dtype).certificate.checks if each.name == check)


# -- certificate ---------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_certificate_holds(name: str, dtype: torch.dtype) -> None:
    certificate = models.hooked(name, dtype).certificate
    assert certificate.ok, repr(certificate)
    assert certificate.refused == {}
    held = {check.name for check in certificate.checks if check.passed}
    assert {"transformers", "streams", "padding", "projections", "ledger", "softmax", "heads", "pattern edit"} <= held
    assert {check.name for check in certificate.remarks} == (
        {"implementations", "bridge"} if name in ALIBI_IN_FALCON else set()
    )
    assert ("attentions" in held) == (name not in ALIBI_IN_FALCON)
    assert ("alibi" in held) == name.startswith(("bloom", "mpt", "falcon_alibi"))
    assert ("rotary" in held) == (name in ROTARY)
    assert ("rotary tables" in held) == (name in ROTARY and name != "gpt_oss_yarn")
    assert ("causal" in held) == ("berta" not in name)


@pytest.mark.parametrize("name", ALIBI_IN_FALCON)
def test_the_certificate_says_that_eager_falcon_counts_alibi_otherwise(name: str) -> None:
    remark = check_of(name, "implementations")
    assert remark.passed is False and remark.points == ()
    assert remark.statement == "eager and sdpa attention of transformers agree"
    assert "attnmech follows sdpa, which computes what was trained" in remark.detail
    assert "implementations differs" in models.hooked(name).certificate.verdict


# -- transformers ---------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype", "side"), TURNS)
def test_logits_are_those_of_plain_transformers(name: str, dtype: torch.dtype, side: str) -> None:
    inputs, real = padded(name, side), real_of(name, side)
    ours = acts_of(name, dtype, side)["logits"][real]
    if (dtype, side) == (F64, "left") and "roberta" not in name:
        # Eager attention gives NaN in rows of padding that see no key, so each text runs alone.
        ids = [row[here] for row, here in zip(inputs["input_ids"], real, strict=True)]
        with torch.no_grad():
            theirs = torch.cat([models.plain(name, F64)(row[None]).logits[0] for row in ids])
        close(ours, theirs, 2e-6)
    else:
        close(ours, plain_output(name, dtype, side).logits[real], 2e-5 if dtype == F32 else 3e-6)


@pytest.mark.parametrize(("name", "dtype", "side"), [turn for turn in TURNS if "roberta" not in turn[0]])
def test_padding_on_either_side_is_as_none(name: str, dtype: torch.dtype, side: str) -> None:
    """Except RoBERTa, which counts positions by ids instead of the mask."""
    inputs, real = padded(name, side), real_of(name, side)
    for row in range(1, len(real)):
        alone = models.hooked(name, dtype).run(inputs["input_ids"][row][real[row]]).logits[0]
        close(acts_of(name, dtype, side)["logits"][row][real[row]], alone, 5e-5)


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] not in ALIBI_IN_FALCON])
def test_patterns_are_those_of_eager_transformers(name: str, dtype: torch.dtype) -> None:
    attentions = plain_output(name, dtype, "right").attentions
    assert len(attentions) == models.hooked(name, dtype).n_layers
    rows = real_of(name)[:, None, :, None]
    for layer, theirs in enumerate(attentions):
        ours = acts_of(name, dtype, "right")["pattern", layer]
        close(ours * rows, theirs.to(dtype) * rows, 1e-5 if dtype == F32 else 1e-6)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_streams_are_the_hidden_states_of_plain_transformers(name: str, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_terms_are_those_that_the_family_has(name: str, dtype: torch.dtype) -> None:
    expected = {"query_key", "mask"}
    expected |= {"key_bias", "query_bias", "constant"} if name in BIASED else set()
    expected |= {"position"} if name.startswith(("bloom", "mpt", "falcon_alibi")) else set()
    expected |= {"softcap"} if name == "gemma2" else set()
    if name.startswith("deberta"):
        expected |= {"key_bias", "content_to_position", "position_to_content"}
    assert set(am.decompose_scores(models.hooked(name, dtype), models.padded(name)).terms) == expected


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


# -- softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_sum_to_one_less_the_mass_of_a_sink(name: str, dtype: torch.dtype) -> None:
    model = models.plain(name, dtype)
    for layer in range(models.hooked(name, dtype).n_layers):
        acts, seen = acts_of(name, dtype, "right"), seen_of(name, layer)
        pattern, scores = acts["pattern", layer], acts["scores", layer].double()
        rows = real_of(name)[:, None, :].expand(pattern.shape[:3])
        expected = torch.ones(pattern.shape[:3], dtype=torch.float64)
        sinks = model.state_dict().get(f"model.layers.{layer}.self_attn.sinks")
        assert (sinks is not None) == name.startswith("gpt_oss")
        if sinks is not None:
            weight = sinks.double().exp()[None, :, None]
            odds = torch.where(seen, scores.exp(), 0.0).sum(-1)
            expected = odds / (odds + weight)
            assert 0.02 < float((1 - expected)[rows].max()) < 0.98
        close(pattern.sum(-1)[rows].double(), expected[rows], 1e-5 if dtype == F32 else 1e-7)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_nothing_beyond_the_window_is_attended_to(name: str) -> None:
    dtype = DTYPES[name]
    narrow = [layer for layer in range(2) if reference.window(models.plain(name, dtype), layer)]
    assert narrow == ([0, 1] if name == "mistral" else [0])
    for layer in range(2):
        pattern = acts_of(name, dtype, "right")["pattern", layer][0]
        for i in range(LENGTH):
            for j in range(i + 1):
                inside = layer not in narrow or i - j < 3
                assert bool((pattern[:, i, j] > 0).all()) == inside, (layer, i, j)


# -- Falcon with ALiBi ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ALIBI_IN_FALCON)
def test_falcon_counts_alibi_once_whatever_attention_the_caller_chose(name: str, implementation: str) -> None:
    model = models.in_attention(models.fresh(name), implementation)
    hooked, ids = am.load(model), models.token_ids(name)
    assert model.config._attn_implementation == implementation
    acts = hooked.run(ids, points=["q", "k", "scores", "logits"])
    heads, kv, d = reference.heads_of(model)
    for layer in range(2):
        q, k = acts["q", layer][0], acts["k", layer][0]
        for h in range(heads):
            slope = torch.tensor(reference.slopes(heads)[h]).bfloat16()
            for i in range(LENGTH):
                for j in range(i + 1):
                    alibi = float((slope.float() * j).bfloat16())
                    expected = (float(q[i, h] @ k[j, h // (heads // kv)]) + alibi) / d**0.5
                    assert float(acts["scores", layer][0, h, i, j]) == pytest.approx(expected, abs=2e-5)
    with torch.no_grad():
        once = models.in_attention(models.fresh(name), "sdpa")(ids).logits
        twice = models.in_attention(models.fresh(name), "eager")(ids).logits
    close(acts["logits"], once, 2e-5)
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


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_embed_is_a_row_of_the_embedding(name: str, dtype: torch.dtype) -> None:
    model = models.plain(name, dtype)
    rows = model.get_input_embeddings().weight.detach()[padded(name)["input_ids"]]
    factor = 6.0 if name == "gemma2" else 1.0
    close(acts_of(name, dtype, "right")["embed"], rows * factor, 1e-6)


@pytest.mark.parametrize("name", sorted(WITH_ONE_STEP))
def test_the_mlp_of_a_parallel_block_is_told_from_its_attention(name: str) -> None:
    """Falcon adds the attention to the MLP's output in place: mlp_out must be the MLP's own output."""
    dtype = DTYPES[name]
    hooked, acts, model = models.hooked(name, dtype), acts_of(name, dtype, "right"), models.plain(name, dtype)
    for layer, block in enumerate(models.blocks_of(model)):
        kept: list[Tensor] = []
        handle = block.get_submodule("mlp").register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output.clone())
        )
        with torch.no_grad():
            model(**padded(name))
        handle.remove()
        close(acts["mlp_out", layer][real_of(name)], kept[0][real_of(name)], 2e-5)
    assert hooked.points["mlp_out"].absent is None


# -- edits ---------------------------------------------------------------------------------------------------


def without_head(name: str, dtype: torch.dtype, layer: int, head: int) -> Any:
    """A plain model whose W_O is zero for one head."""
    model = models.fresh(name, dtype)
    d = reference.heads_of(model)[2]
    path = reference._place(model).block.format(layer) + reference._place(model).out
    with torch.no_grad():
        model.get_submodule(path).weight[:, head * d : (head + 1) * d] = 0
    return models.in_attention(model, "sdpa" if name in ALIBI_IN_FALCON else "eager")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_head_without_z_is_a_head_without_output_weights(name: str, dtype: torch.dtype) -> None:
    hooked, inputs, real = models.hooked(name, dtype), padded(name), real_of(name)
    layer, head = hooked.n_layers - 1, hooked.n_heads - 2

    def zeroed(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, :, head] = 0
        return z

    with hooked.hooks({("z", layer): zeroed}):
        ours = hooked.run(inputs).logits
    with torch.no_grad():
        theirs = without_head(name, dtype, layer, head)(**inputs).logits
    before = acts_of(name, dtype, "right")["logits"]
    close(ours[real], theirs[real], 2e-5)
    assert float((ours - before)[real].abs().max()) > 1e-3
    assert torch.equal(hooked.run(inputs).logits, before)


@pytest.mark.parametrize(
    "name", ["mpt3", "falcon_alibi_parallel", "falcon_new", "gptj", "gemma2", "gpt_oss", "roberta", "deberta_v2"]
)
def test_hooks_leave_the_callers_model_as_it_was(name: str) -> None:
    model, inputs = models.in_attention(models.fresh(name), "eager"), padded(name)
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    with torch.no_grad():
        before = model(**inputs).logits
    hooked = am.load(model)
    points = ("embed", "attn_in", "q", "k", "scores", "pattern", "z", "attn_out", "mlp_out")
    with hooked.hooks({point: lambda x: x * 0.5 for point in points}):
        hooked.run(inputs, points=["pattern", "resid_post"])
        with torch.no_grad():
            during = model(**inputs).logits
    with torch.no_grad():
        after = model(**inputs).logits
    real = real_of(name)
    assert torch.equal(before[real], during[real]) and torch.equal(before[real], after[real])
    assert model.config.to_dict() == config
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "point"),
    [
        *((name, point) for name in ("falcon_new", "gemma2", "gptj", "qwen3_bias") for point in ("q", "pattern")),
        *(("falcon_new", point) for point in ("mlp_out", "attn_out", "resid_pre")),
        *(("falcon_alibi_parallel", point) for point in ("mlp_out", "attn_out")),
    ],
)
def test_gradients_against_finite_differences(name: str, point: str) -> None:
    hooked, ids = models.hooked(name, F64), models.token_ids(name, 1, 5)
    coefficients = torch.randn(5, hooked.n_vocab, generator=torch.Generator().manual_seed(5), dtype=F64)

    def measure(logits: Tensor) -> Tensor:
        return (logits[0] * coefficients).sum()

    for layer in range(hooked.n_layers):
        found = hooked.run(ids, points=[(point, layer)], gradients_of=measure)
        gradient = found.gradients
        assert gradient is not None
        value, slope = found[point, layer], gradient[point, layer]
        assert float(slope.abs().max()) > 0
        places = [(0, 3, 1), (0, 1, 2)] if value.ndim == 3 else [(0, 2, 1, 0), (0, 1, 2, 1)]
        for place in places:
            # These families compute norms in float32, so the step of a difference must not be small.
            step = 1e-3 if reference._place(models.plain(name)).norm_kind == "layer" else 3e-2
            ends = []
            for sign in (1, -1):
                moved = value.clone()
                moved[place] += sign * step
                with hooked.hooks({(point, layer): lambda _, moved=moved: moved}):
                    ends.append(float(measure(hooked.run(ids).logits)))
            difference = (ends[0] - ends[1]) / (2 * step)
            rough = 1e-5 if step < 1e-2 else 2e-3
            assert float(slope[place]) == pytest.approx(difference, rel=rough, abs=rough * float(slope.abs().max()))
