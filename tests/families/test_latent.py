"""Multi-head latent attention: queries, keys and values after the latent's expansion, and the latent as a point."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import transformers
from caching import cached
from comparing import require_gradient
from models import in_attention, randomised
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import CertificateError, UnsupportedModelError
from attnmech.model.files.load import UnprovenWarning
from attnmech.model.structure.structure import read_structure

F32, F64 = torch.float32, torch.float64
NOPE, ROPE, VALUE, LATENT, HEADS, LAYERS = 8, 6, 10, 20, 4, 3
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 70, "hidden_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "intermediate_size": 52, "moe_intermediate_size": 28, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "V2": ("deepseek_v2", {}),
    "V2 without a latent of queries": ("deepseek_v2", {"q_lora_rank": None}),
    "V2, YaRN": ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "V3": ("deepseek_v3", {}),
    "V3 without a latent of queries": ("deepseek_v3", {"q_lora_rank": None}),
    "V3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "V3, biases": ("deepseek_v3", {"attention_bias": True}),
    "V3, YaRN": ("deepseek_v3", {"rope_parameters": YARN}),
    "GLM": ("glm4_moe_lite", {}),
    "MiniCPM3": ("minicpm3", {}),
}
LAYER: Final = 1


def fresh(case: str, dtype: torch.dtype = F32) -> Any:
    kind, options = CASES[case]
    # Routed experts cannot run in float64.
    dense = {"glm4_moe_lite": {"mlp_layer_types": ["dense"] * LAYERS}}.get(kind, {"first_k_dense_replace": LAYERS})
    dense = {"first_k_dense_replace": 1} if dtype == F32 and kind != "glm4_moe_lite" else dense
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **dense, **options})
    return randomised(transformers.AutoModelForCausalLM.from_config(config), dtype=dtype)


@cached
def plain(case: str, dtype: torch.dtype = F32) -> Any:
    return in_attention(fresh(case, dtype), "eager")


@cached
def hooked(case: str, dtype: torch.dtype = F32) -> am.HookedModel:
    return am.load(fresh(case, dtype))


def ids(texts: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 70, (texts, length), generator=torch.Generator().manual_seed(4))


def attention_of(model: Any, layer: int = LAYER) -> Any:
    return model.model.layers[layer].self_attn


def with_hook(model: Any, path: str, change: Callable[[Tensor], Tensor], layer: int = LAYER) -> Any:
    """A user's forward hook on the output of a module of the attention."""
    attention_of(model, layer).get_submodule(path).register_forward_hook(lambda module, args, out: change(out))
    return model


def precisions() -> list[Any]:
    # In float64, DeepSeek-V2 rotates in float32: see below.
    in_64 = ("V3 without a latent of queries", "V3, biases", "V3, YaRN", "GLM", "MiniCPM3")
    found = [*((case, F32) for case in CASES), *((case, F64) for case in in_64)]
    return [pytest.param(case, dtype, id=f"{case}, {dtype}") for case, dtype in found]


# -- the raw weights, written out ------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


def through(projection: nn.Linear, x: Tensor) -> Tensor:
    out = x @ projection.weight.T
    return out if projection.bias is None else out + projection.bias


def turned(x: Tensor, angles: Tensor, factor: float, *, pairs: bool) -> Tensor:
    """Rotates vectors of ROPE entries: each pair (x_2i, x_2i+1) or (x_i, x_i+half) by its angle."""
    made = torch.empty_like(x)
    for i in range(ROPE // 2):
        one, other = (2 * i, 2 * i + 1) if pairs else (i, i + ROPE // 2)
        cos, sin = (f(angles[:, i])[:, None] * factor for f in (torch.cos, torch.sin))
        made[..., one] = x[..., one] * cos - x[..., other] * sin
        made[..., other] = x[..., other] * cos + x[..., one] * sin
    return made


@torch.no_grad()
def expected(case: str, x: Tensor, dtype: torch.dtype = F32, layer: int = LAYER) -> dict[str, Tensor]:
    """Every point up to z, from the attention's inputs, head by head in float64."""
    model = plain(case, dtype)
    attention, config = attention_of(model, layer).double(), model.config
    x = x.double()

    def normed(norm: Any, value: Tensor) -> Tensor:
        return rms_norm(value, norm.weight, norm.variance_epsilon)

    made = through(attention.kv_a_proj_with_mqa, x)
    latent, shared = normed(attention.kv_a_layernorm, made[..., :LATENT]), made[..., LATENT:]
    if config.q_lora_rank is None:
        queries = through(attention.q_proj, x)
    else:
        queries = through(attention.q_b_proj, normed(attention.q_a_layernorm, through(attention.q_a_proj, x)))
    queries = queries.view(*x.shape[:2], HEADS, NOPE + ROPE)
    of_heads = through(attention.kv_b_proj, latent).view(*x.shape[:2], HEADS, NOPE + VALUE)
    keys = torch.stack([torch.cat((of_heads[:, :, head, :NOPE], shared), dim=-1) for head in range(HEADS)], dim=2)
    # DeepSeek-V3 rotates neighbours, and puts the first entries of all pairs before the second ones.
    interleaved = getattr(config, "rope_interleave", False) and config.model_type != "minicpm3"
    order = [*range(0, ROPE, 2), *range(1, ROPE, 2)] if interleaved else list(range(ROPE))
    queries, keys = (
        torch.cat((each[..., :NOPE], each[..., [NOPE + place for place in order]]), dim=-1) for each in (queries, keys)
    )
    values = of_heads[..., NOPE:]
    rotary = model.model.rotary_emb
    angles = torch.arange(x.shape[1])[:, None] * rotary.inv_freq.double()
    pairs = config.model_type == "deepseek_v2"
    q_rot, k_rot = (
        torch.cat((each[..., :NOPE], turned(each[..., NOPE:], angles, rotary.attention_scaling, pairs=pairs)), dim=-1)
        for each in (queries, keys)
    )
    scores = torch.einsum("bihd,bjhd->bhij", q_rot, k_rot) * attention.scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    attention.to(dtype)
    return {
        "latent": latent, "q": queries, "k": keys, "v": values, "q_rot": q_rot, "k_rot": k_rot,
        "scores": scores.masked_fill(hidden, torch.finfo(dtype).min), "pattern": pattern,
        "z": torch.einsum("bhij,bjhd->bihd", pattern, values),
    }  # fmt: skip


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype = F32) -> None:
    limit = 2e-5 if dtype == F32 else 1e-6  # norms compute in float32, also in a float64 model
    torch.testing.assert_close(ours.to(F64), theirs.to(F64), rtol=limit, atol=limit)


# -- what points mean ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), precisions())
def test_points_are_what_the_raw_weights_make(case: str, dtype: torch.dtype) -> None:
    names = ["attn_in", "latent", "q", "k", "v", "q_rot", "k_rot", "scores", "pattern", "z", "result", "attn_raw"]
    run = hooked(case, dtype).run(ids(), points=names)
    theirs = expected(case, run["attn_in", LAYER], dtype)
    W_O = attention_of(plain(case, dtype)).o_proj.weight.detach().view(-1, HEADS, VALUE).to(F64)
    theirs["result"] = torch.einsum("bihd,mhd->bihm", theirs["z"], W_O)
    for name, value in theirs.items():
        assert run[name, LAYER].shape == value.shape
        close(run[name, LAYER], value, dtype)
    bias = attention_of(plain(case, dtype)).o_proj.bias
    close(run["attn_raw", LAYER], theirs["result"].sum(dim=2) + (0 if bias is None else bias.detach()), dtype)


@pytest.mark.parametrize(("case", "dtype"), precisions())
def test_terms_add_up_to_the_scores(case: str, dtype: torch.dtype) -> None:
    split = am.decompose_scores(hooked(case, dtype), ids(length=17))
    assert float((split.residual / split.largest).max()) < 8 * torch.finfo(dtype).eps
    # The shared part of the keys has a separate bias.
    assert set(split.terms) == {"query_key", "mask"} | ({"query_bias"} if "biases" in case else set())
    theirs = expected(case, hooked(case, dtype).run(ids(length=17), points=["attn_in"])["attn_in", LAYER], dtype)
    total = sum(term[:, LAYER] for name, term in split.terms.items() if name != "mask")
    seen = theirs["scores"] > torch.finfo(dtype).min
    close(torch.as_tensor(total).expand_as(theirs["scores"])[seen], theirs["scores"][seen], dtype)


def test_the_sizes_of_points_and_weights() -> None:
    model = hooked("V3")
    shapes = {name: point.shape for name, point in model.points.items()}
    assert shapes["latent"] == f"batch position d_latent={LATENT}"
    assert shapes["k"] == f"batch position kv_head={HEADS} d_head={NOPE + ROPE}"
    assert shapes["v"] == f"batch position kv_head={HEADS} d_head={VALUE}"
    assert shapes["z"] == f"batch position head={HEADS} d_head={VALUE}"
    assert model.points["v"].meaning == "latent W_V + b_V"
    weights = model.weights(LAYER)
    assert weights.W_Q.shape == (HEADS, 24, NOPE + ROPE)
    assert weights.W_K.shape == (HEADS, LATENT + 40, NOPE + ROPE)
    assert weights.W_V.shape == (HEADS, LATENT, VALUE)
    assert not weights.W_K[:, :LATENT, NOPE:].any() and not weights.W_K[:, LATENT:, :NOPE].any()
    assert hooked("V3 without a latent of queries").weights(LAYER).W_Q.shape == (HEADS, 40, NOPE + ROPE)


def test_float64_deepseek_v2_is_refused_where_transformers_rotates_in_float32() -> None:
    with pytest.warns(UnprovenWarning):
        model = am.load(fresh("V2", F64))
    assert {check.name for check in model.certificate.failed} == {"rotary", "ledger"}
    with pytest.raises(CertificateError, match="q_rot"):
        model.run(ids(), points=["q_rot"])


# -- edits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["V2, YaRN", "V3, biases", "GLM", "MiniCPM3"])
def test_an_edit_of_the_latent_is_that_of_a_hook_on_its_norm(case: str) -> None:
    shift = torch.randn(LATENT, generator=torch.Generator().manual_seed(5))

    def change(latent: Tensor) -> Tensor:
        return 0.7 * latent + shift

    with torch.no_grad():
        theirs = with_hook(fresh(case), "kv_a_layernorm", change)(ids()).logits
    with hooked(case).hooks({("latent", LAYER): change}):
        run = hooked(case).run(ids(), points=["latent", "k", "v", "logits"])
        am.decompose_scores(hooked(case), ids())
    before = hooked(case).run(ids(), points=["latent", "k", "v"])
    close(run.logits, theirs)
    close(run["latent", LAYER], change(before["latent", LAYER]))
    shared = slice(NOPE, None)
    assert torch.equal(run["k", LAYER][..., shared], before["k", LAYER][..., shared])
    assert not torch.equal(run["k", LAYER], before["k", LAYER])
    assert not torch.equal(run["v", LAYER], before["v", LAYER])


@pytest.mark.parametrize(
    ("case", "name"),
    [("V2, YaRN", "q"), ("V3", "k"), ("V3, biases", "v"), ("V3 without a latent of queries", "q"), ("V2, YaRN", "k")],
)
def test_edits_of_single_heads_change_what_the_points_after_them_say(case: str, name: str) -> None:
    """Also for keys, whose last part comes from one vector for all heads."""
    model, head = hooked(case), 1
    before = model.run(ids(), points=["q_rot", "k_rot", "pattern", "v", "z"])

    def change(value: Tensor) -> Tensor:
        value[:, :, head] *= -0.5
        return value

    with model.hooks({(name, LAYER): change}):
        after = model.run(ids(), points=["q_rot", "k_rot", "pattern", "v", "z"])
    point = "v" if name == "v" else f"{name}_rot"
    wanted = change(before[point, LAYER].clone())
    close(after[point, LAYER], wanted)
    q, k, v = (wanted if each == point else before[each, LAYER] for each in ("q_rot", "k_rot", "v"))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * attention_of(plain(case)).scaling
    pattern = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    close(after["pattern", LAYER], pattern)
    close(after["z", LAYER], torch.einsum("bhij,bjhd->bihd", pattern, v))


@pytest.mark.parametrize("point", ["latent", "k", "v"])
def test_gradients_at_keys_values_and_latent(point: str) -> None:
    """Norms compute in float32, also in a float64 model."""

    def measure(logits: Tensor) -> Tensor:
        return logits[:, -1, 7].sum()

    require_gradient(hooked("V3, biases", F64), ids(), (point, LAYER), measure, step=1e-2, relative=2e-3)


def test_dropping_the_query_key_term_leaves_a_uniform_pattern() -> None:
    model = hooked("V3")
    with model.intervene(am.Intervention.scale("query_key", 0.0, [(LAYER, 3)])):
        pattern = model.run(ids(), points=["pattern"])["pattern", LAYER][:, 3]
    close(pattern, torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None] + torch.zeros(2, 1, 1))


# -- methods ---------------------------------------------------------------------------------------------------


def test_methods_that_need_linear_queries_and_keys_refuse_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="expanded from a latent"):
        am.decompose_by_source(hooked("V3"), ids())
    with pytest.raises(UnsupportedModelError, match=r"fold_norm=True needs .* expands them from latents"):
        am.decompose_scores(hooked("V3"), ids(), fold_norm=True)


def test_methods_take_values_that_are_narrower_than_keys() -> None:
    model, texts = hooked("V2"), [ids(1), ids(1, 7)]
    means = am.mean_z(model, texts)
    assert means.by_layer[LAYER].shape == (1, 1, HEADS, VALUE)
    with model.intervene(am.Intervention.replace([(LAYER, 0)], means)):
        z = model.run(ids(), points=["z"])["z", LAYER][:, :, 0]
    close(z, means.by_layer[LAYER][:, :, 0].expand_as(z))
    ones = {LAYER: torch.ones(1, 1, HEADS, VALUE)}
    with model.intervene(am.Intervention.replace_values([(LAYER, 0)], [0, 1, 2], ones)):
        z = model.run(ids(1, 3), points=["z"])["z", LAYER][:, :, 0]
    close(z, torch.ones(1, 3, VALUE))
    for method in (am.null_attention, am.residual_updates, am.attention_focus):
        method(model, ids())


# -- broken models ---------------------------------------------------------------------------------------------


def swap_values(made: Tensor) -> Tensor:
    by_head = made.unflatten(-1, (HEADS, NOPE + VALUE)).clone()
    by_head[..., [0, 1], NOPE:] = by_head[..., [1, 0], NOPE:]
    return by_head.flatten(-2)


BROKEN: dict[str, tuple[str, Callable[[Tensor], Tensor], set[str]]] = {
    "the latent's norm": ("kv_a_layernorm", lambda x: 1.01 * x, {"latent"}),
    "the norm of the queries' latent": ("q_a_layernorm", lambda x: x + 0.01, {"latent"}),
    "the shared part of keys from the token before": (
        "kv_a_proj_with_mqa",
        lambda made: torch.cat((made[..., :LATENT], made[..., LATENT:].roll(1, dims=1)), dim=-1),
        {"projections", "ledger", "causal", "padding", "streams"},
    ),
    "what makes the latent": ("kv_a_proj_with_mqa", lambda x: x * (1 + 0.1 * x), {"latent", "projections", "ledger"}),
    "values from another head's columns": ("kv_b_proj", swap_values, {"projections"}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_is_not_certified(what: str) -> None:
    path, change, checks = BROKEN[what]
    with pytest.warns(UnprovenWarning):
        certificate = am.load(with_hook(fresh("V3"), path, change)).certificate
    assert {check.name for check in certificate.failed} == checks, repr(certificate)


@pytest.mark.parametrize("what", ["v", "k", "latent", "query latent"])
def test_a_wrong_architecture_is_not_certified(what: str) -> None:
    model = fresh("V3")
    plan = read_structure(model)
    layout = plan.expanded
    assert layout is not None and layout.query_latent is not None
    of_q, of_k, of_v = layout.columns
    wrong = {
        "v": replace(layout, columns=(of_q, of_k, of_v[VALUE:] + of_v[:VALUE])),
        "k": replace(layout, columns=(of_q, of_k[::-1], of_v)),
        "latent": replace(layout, latent=replace(layout.latent, columns=layout.latent.columns[::-1])),
        "query latent": replace(layout, query_latent=replace(layout.query_latent, columns=(0,) * 24)),
    }[what]
    with pytest.warns(UnprovenWarning):
        assert not am.load(model, architecture=replace(plan, qkv=wrong)).certificate.ok
    assert am.load(model, architecture=plan).certificate.ok
