"""Families whose attention multiplies queries, keys and values itself, or whose layers share a block, and encoders."""

import copy
from dataclasses import replace
from itertools import count, cycle
from typing import Any

import pytest
import tiny
import torch
import transformers
from caching import cached
from models import randomised
from torch import Tensor

import attnmech as am
from attnmech.errors import UnsupportedModelError
from attnmech.model.attention.postponed import Product, through_attend
from attnmech.model.parts.position import HALVES_ONCE
from attnmech.model.structure import rewritten

ENCODERS = ("albert", "mpnet", "rembert", "roformer", "luke", "tapas", "megatron-bert")
DECODERS = ("git", "xglm", "trocr", "openai-gpt", "gpt_neox_japanese")
READ = ("distilbert", "electra", "camembert", "modernbert", "esmc")
"""Encoders whose attention goes through transformers' interface."""
HYBRIDS = ("bailing_hybrid",)
KINDS = (*ENCODERS, *DECODERS, *READ, *HYBRIDS)
SHARED = ("albert", "albert_groups")
F32, F64 = torch.float32, torch.float64
LENGTH = 9


@cached
def raw(kind: str, other: bool = False, dtype: torch.dtype = F32) -> Any:
    """transformers' model in eager attention, shared by the tests, which must not change it."""
    if kind == "albert_groups":
        config = tiny.config_of("albert")
        config.num_hidden_layers, config.num_hidden_groups, config.inner_group_num = 5, 2, 3
        model = randomised(transformers.AlbertForMaskedLM(config), dtype=dtype)
    elif kind == "roformer_wide":
        config = tiny.config_of("roformer")
        config.embedding_size = config.hidden_size
        model = randomised(transformers.RoFormerForMaskedLM(config), dtype=dtype)
    else:
        model = tiny.model_of(kind, tiny.OTHER if other else tiny.ONE, dtype=dtype, seed=int(other))
    model.config._attn_implementation = "eager"
    model.base_model.config._attn_implementation = "eager"
    return model


@cached
def hooked(kind: str, other: bool = False, dtype: torch.dtype = F32) -> am.HookedModel:
    return am.load(raw(kind, other, dtype))


def inputs_of(side: str = "") -> dict[str, Tensor]:
    """Texts of 9 and 6 tokens, padded on one side; without a side, both have 9."""
    ids = torch.randint(10, 80, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    if side:
        mask[1, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def output_of(model: Any, side: str = "", **options: Any) -> Any:
    uncached = {"use_cache": False} if "use_cache" in model.config.to_dict() else {}
    with torch.no_grad():
        return model(**inputs_of(side), **uncached, **options)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def attentions_of(kind: str, side: str = "", dtype: torch.dtype = F32) -> list[Tensor]:
    output = output_of(raw(kind, dtype=dtype), side, output_attentions=True)
    return [each for each in output.attentions if each is not None]


def shared_out(kind: str) -> list[tuple[Any, int]]:
    """W_O of each layer of a raw model, and the number of its call in a pass (ALBERT's layers share one W_O)."""
    stack = hooked(kind).stacks[""]
    weights = [stack.module(layer, stack.architecture.out).weight for layer in stack.layers]
    by_weight = {id(module.weight): module for module in raw(kind).modules() if hasattr(module, "weight")}
    calls = [sum(each is weight for each in weights[:place]) for place, weight in enumerate(weights)]
    return [(by_weight[id(weight)], call) for weight, call in zip(weights, calls, strict=True)]


# -- against plain transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "albert_groups"])
def test_the_certificate_holds(kind: str) -> None:
    model = hooked(kind)
    assert model.certificate.ok, repr(model.certificate)
    assert model.certificate.refused == {}
    held = {check.name for check in model.certificate.checks if check.passed}
    assert {"transformers", "padding", "projections", "ledger", "softmax", "heads", "chain", "pattern edit"} <= held | (
        {"chain"} if kind in HYBRIDS else set()
    )
    assert ("rotary tables" in held) == (
        kind in ("roformer", "gpt_neox_japanese", "esmc", *HYBRIDS)
    ) or kind == "modernbert"
    assert model.causal == (kind in DECODERS + HYBRIDS)
    assert (model.architecture.replacement is through_attend) == (kind in ENCODERS[1:] + DECODERS)


@pytest.mark.parametrize(("side", "kind"), [*zip(cycle(("", "right", "left")), [*KINDS, "albert_groups"])])
def test_logits_are_those_of_plain_transformers(kind: str, side: str) -> None:
    real = inputs_of(side)["attention_mask"].bool()
    ours = hooked(kind).run(inputs_of(side)).logits
    assert ours is not None
    close(ours[real], output_of(raw(kind), side).logits[real], 2e-5)


@pytest.mark.parametrize("kind", ["albert", "roformer", "openai-gpt"])
def test_other_sizes_and_weights(kind: str) -> None:
    assert hooked(kind, True).certificate.ok
    ours = hooked(kind, True).run(inputs_of("right")).logits
    assert ours is not None
    close(ours[0], output_of(raw(kind, True), "right").logits[0], 2e-5)


@pytest.mark.parametrize("kind", ["mpnet", "gpt_neox_japanese"])
def test_in_float64(kind: str) -> None:
    model = hooked(kind, dtype=F64)
    assert model.certificate.ok, repr(model.certificate)
    split = am.decompose_scores(model, inputs_of())
    assert float((split.residual / split.largest).max()) <= 1e-12


@pytest.mark.parametrize("kind", [*KINDS, "albert_groups"])
def test_patterns_are_those_of_eager_transformers(kind: str) -> None:
    model, rows = hooked(kind), inputs_of("right")["attention_mask"].bool()[:, None, :, None]
    ours, theirs = model.run(inputs_of("right"), points=["pattern"]), attentions_of(kind, "right")
    layers = model.stacks[""].layers
    for layer, each in zip(layers, theirs, strict=True):
        close(ours["pattern", layer] * rows, each * rows, 5e-5)


@pytest.mark.parametrize("kind", [*KINDS, "albert_groups"])
def test_the_terms_of_the_ledger_make_transformers_pattern(kind: str) -> None:
    # Rounding of scores of several thousand, as in the first layer of this RemBERT, exceeds the bound in float32.
    dtype = F64 if kind == "rembert" else F32
    split = am.decompose_scores(hooked(kind, dtype=dtype), inputs_of())
    for place, theirs in enumerate(attentions_of(kind, dtype=dtype)):
        total = torch.stack([term[:, place].expand(theirs.shape) for term in split.terms.values()]).sum(dim=0)
        close(total.softmax(dim=-1), theirs.to(total), 5e-5)


@pytest.mark.parametrize("kind", [*KINDS, "albert_groups"])
def test_zeroing_a_head_is_zeroing_what_w_o_reads_of_it(kind: str) -> None:
    model = hooked(kind)
    stack, place = model.stacks[""], 1
    head, width = stack.n_heads - 2, stack.d_value
    out, number = shared_out(kind)[place]
    calls = count()

    def before(module: Any, args: Any) -> Any:
        if next(calls) != number:
            return None
        given = args[0].clone()
        given[..., head * width : head * width + width] = 0
        return (given, *args[1:])

    handle = out.register_forward_pre_hook(before)
    try:
        theirs = output_of(raw(kind), "right").logits
    finally:
        handle.remove()
    with model.intervene(am.Intervention.zero([(stack.layers[place], head)])):
        ours = model.run(inputs_of("right")).logits
    plain, real = model.run(inputs_of("right")).logits, inputs_of("right")["attention_mask"].bool()
    assert ours is not None and plain is not None
    close(ours[real], theirs[real], 2e-5)
    assert float((ours - plain)[real].abs().max()) > 1e-3 * float(theirs.abs().max())


@pytest.mark.parametrize("kind", ["mpnet", "roformer_wide", "tapas", "openai-gpt", "gpt_neox_japanese", "esmc"])
def test_writers_of_the_stream_make_the_scores(kind: str) -> None:
    residual = am.decompose_by_source(hooked(kind), inputs_of()).residual
    largest = am.decompose_scores(hooked(kind), inputs_of()).largest
    assert residual.isfinite().all()
    assert float((residual / largest).max()) <= 1e-4


# -- what is special of a family -----------------------------------------------------------------------------


def test_mpnets_relative_bias_is_a_position_term() -> None:
    terms = am.decompose_scores(hooked("mpnet"), inputs_of()).terms
    with torch.no_grad():
        bias = raw("mpnet").mpnet.encoder.compute_position_bias(torch.zeros(2, LENGTH, 1))
    for layer in range(4):
        assert torch.equal(terms["position"][:, layer].expand_as(bias), bias.to(terms["position"]))
    assert "mask" not in {name for name, term in terms.items() if bool(term.any())}


def test_openai_gpts_lower_triangle_is_a_mask_and_no_position() -> None:
    terms = am.decompose_scores(hooked("openai-gpt"), inputs_of()).terms
    assert "position" not in terms
    shown = terms["mask"][0, 0].expand(6, LENGTH, LENGTH) == 0
    assert torch.equal(shown, torch.ones(6, LENGTH, LENGTH, dtype=torch.bool).tril())


@pytest.mark.parametrize("kind", ["xglm", "trocr"])
def test_a_scale_before_the_product_is_the_queries(kind: str) -> None:
    model = hooked(kind)
    assert model.architecture.query_scale == pytest.approx(model.d_head**-0.5)


@pytest.mark.parametrize("kind", SHARED)
def test_each_use_of_a_shared_block_is_a_layer(kind: str) -> None:
    model, config = hooked(kind), raw(kind).config
    assert model.n_layers == config.num_hidden_layers * config.inner_group_num
    assert model.config.num_hidden_groups == config.num_hidden_groups
    assert {id(each) for _, each in model.named_parameters()} == {id(each) for each in raw(kind).parameters()}
    # An edit changes only its own layer: earlier layers with the same weights are unchanged.
    with model.hooks({("pattern", 2): lambda pattern: pattern.flip(-1)}):
        edited = model.run(inputs_of(), points=["z", "resid_pre"])
    plain = model.run(inputs_of(), points=["z", "resid_pre"])
    for layer in range(2):
        assert torch.equal(edited["z", layer], plain["z", layer])
    assert torch.equal(edited["resid_pre", 2], plain["resid_pre", 2])
    assert not torch.equal(edited["z", 2], plain["z", 2])
    assert not torch.equal(edited["resid_pre", 3], plain["resid_pre", 3])


def test_the_last_bias_of_gpt_neox_japanese_is_b_o() -> None:
    stack = hooked("gpt_neox_japanese").stacks[""]
    biases = [stack.weights(layer).b_O for layer in stack.layers]
    assert [bias is None for bias in biases] == [True, True, True, False]
    last = raw("gpt_neox_japanese").base_model.layers[3].attention.dense_bias
    assert biases[-1] is not None and torch.equal(biases[-1], last)


def test_what_replaces_the_attention_is_on_the_copy_alone() -> None:
    model = tiny.model_of("mpnet")
    before = output_of(model).logits
    am.load(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(output_of(model).logits, before)


REFUSED = {
    "convbert": "comes from a convolution, not from attention", "cpmant": "its own prompt tokens",
    "doge": "a function of the values to the scores", "funnel": "pools positions", "ibert": "quantised",
    "mra": "approximates the softmax", "xlm": "in separate lists",
    "nystromformer": "by landmarks", "squeezebert": "convolutions", "yoso": "by hashing", "axk2": "an indexer selects",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(kind: str) -> None:
    model = tiny.model_of(kind)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]) as caught:
        am.load(model)
    assert str(caught.value).startswith(f"{type(model).__name__} (model_type {kind!r}) is not supported: ")


# -- a wrong reading is found --------------------------------------------------------------------------------


def test_a_bias_that_is_lost_fails_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Product.masked
    monkeypatch.setattr(Product, "masked", lambda self: (whole(self)[0], None))
    with pytest.warns(UserWarning, match="mpnet|MPNet"):
        model = am.load(tiny.model_of("mpnet"))
    assert {"transformers", "streams", "attentions"} <= {check.name for check in model.certificate.failed}


def test_another_rotation_than_the_models_fails_the_certificate() -> None:
    plan = hooked("roformer").architecture
    wrong = replace(plan, rotary=replace(HALVES_ONCE, theta=10_000.0))
    with pytest.warns(UserWarning, match="fail"):
        model = am.load(tiny.model_of("roformer"), architecture=wrong)
    assert {"rotary", "ledger"} <= {check.name for check in model.certificate.failed}


def test_blocks_unrolled_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dict(rewritten._REWRITTEN)

    def backwards(encoder: Any) -> None:
        right["AlbertTransformer"](encoder)
        encoder.albert_layer_groups = torch.nn.ModuleList(reversed(encoder.albert_layer_groups))

    monkeypatch.setattr(rewritten, "_REWRITTEN", {"AlbertTransformer": backwards})
    with pytest.raises(UnsupportedModelError, match="its output changes"):
        am.load(copy.deepcopy(raw("albert_groups")))
