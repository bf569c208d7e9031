"""Families whose attention multiplies queries, keys and values itself, or whose layers share a block, and encoders."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
import transformers
from caching import cached
from models import randomised

import attnmech as am
from attnmech.errors import UnsupportedModelError
from attnmech.model.attention.postponed import Product
from attnmech.model.parts.position import HALVES_ONCE
from attnmech.model.structure import rewritten

SHARED = ("albert", "albert_groups")
LENGTH = 9
INPUTS = {"input_ids": torch.randint(10, 80, (2, LENGTH), generator=torch.Generator().manual_seed(7))}


@cached
def raw(kind: str) -> Any:
    if kind == "albert_groups":
        model = tiny.albert_groups()
    elif kind == "roformer_wide":
        config = tiny.config_of("roformer")
        config.embedding_size = config.hidden_size
        model = randomised(transformers.RoFormerForMaskedLM(config))
    else:
        model = tiny.model_of(kind)
    model.config._attn_implementation = "eager"
    model.base_model.config._attn_implementation = "eager"
    return model


@cached
def hooked(kind: str) -> am.HookedModel:
    return am.load(raw(kind))


def output_of(model: Any) -> Any:
    with torch.no_grad():
        return model(**INPUTS)


# -- what is special of a family -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpnet", "roformer_wide", "tapas", "openai-gpt", "gpt_neox_japanese", "esmc"])
def test_writers_of_the_stream_make_the_scores(kind: str) -> None:
    residual = am.decompose_by_source(hooked(kind), INPUTS).residual
    largest = am.decompose_scores(hooked(kind), INPUTS).largest
    assert residual.isfinite().all()
    assert float((residual / largest).max()) <= 1e-4


def test_mpnets_relative_bias_is_a_position_term() -> None:
    terms = am.decompose_scores(hooked("mpnet"), INPUTS).terms
    with torch.no_grad():
        bias = raw("mpnet").mpnet.encoder.compute_position_bias(torch.zeros(2, LENGTH, 1))
    for layer in range(4):
        assert torch.equal(terms["position"][:, layer].expand_as(bias), bias.to(terms["position"]))
    assert "mask" not in {name for name, term in terms.items() if bool(term.any())}


def test_openai_gpts_lower_triangle_is_a_mask_and_no_position() -> None:
    terms = am.decompose_scores(hooked("openai-gpt"), INPUTS).terms
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
        edited = model.run(INPUTS, points=["z", "resid_pre"])
    plain = model.run(INPUTS, points=["z", "resid_pre"])
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


# -- a wrong reading is found --------------------------------------------------------------------------------


def test_a_bias_that_is_lost_fails_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Product.masked
    monkeypatch.setattr(Product, "masked", lambda self: (whole(self)[0], None))
    with pytest.warns(UserWarning, match="mpnet|MPNet"):
        model = am.load(tiny.model_of("mpnet"))
    assert {"transformers", "streams", "attentions"} <= {check.name for check in model.certificate.failed}


def test_another_rotation_than_the_models_fails_the_certificate() -> None:
    wrong = replace(hooked("roformer").architecture, rotary=replace(HALVES_ONCE, theta=10_000.0))
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
