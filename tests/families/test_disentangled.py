"""DeBERTa: content-to-position and position-to-content terms in the model, the ledger and the certificate."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import models
import pytest
import reference
import torch
from comparing import close
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import attnmech as am
from attnmech.errors import CertificateError, UnsupportedModelError
from attnmech.maths.relative import Relative, log_bucket
from attnmech.model.attention import attend as attention
from attnmech.model.attention.relative_positions import DisentangledAttention, row_of_distance

F64 = torch.float64
NAMES = ("deberta", "deberta_v2", "deberta_v2_own_projections")
RELATIVE = ("content_to_position", "position_to_content")
VARIANTS: dict[str, Callable[[], Any]] = {
    "c2p alone": lambda: models.deberta_v2(pos_att_type="c2p", share_att_key=False),
    "p2c alone": lambda: models.deberta_v2(pos_att_type="p2c", share_att_key=False),
    "shared, p2c alone": lambda: models.deberta_v2(pos_att_type=["p2c"]),
    "neither": lambda: models.deberta_v2(pos_att_type=[]),
    "absolute positions too": lambda: models.deberta_v2(position_biased_input=True),
    "no relative attention": lambda: models.deberta(relative_attention=False),
    "first, p2c alone": lambda: models.deberta(pos_att_type=["p2c"]),
    "first, far": lambda: models.deberta(max_relative_positions=-1, max_position_embeddings=12),
    "convolution": lambda: models.deberta_v2(conv_kernel_size=3, conv_act="gelu", layers=3),
}


def failing(model: am.HookedModel) -> dict[str, str]:
    return {check.name: check.detail for check in am.certify(model).checks if check.passed is False}


@cache
def long_ids() -> Tensor:
    return torch.randint(3, 59, (2, 41), generator=torch.Generator().manual_seed(4))


# -- the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_certified_and_add_up(variant: str) -> None:
    plain = models.randomised(VARIANTS[variant]())
    hooked = am.load(plain)
    assert hooked.certificate.ok, repr(hooked.certificate)
    kinds = plain.config.pos_att_type if plain.config.relative_attention else []
    split = am.decompose_scores(hooked, long_ids()[:, :11])
    wanted = {name for name, kind in zip(RELATIVE, ("c2p", "p2c"), strict=True) if kind in kinds}
    assert set(RELATIVE) & set(split.terms) == wanted
    with torch.no_grad():
        close(hooked.run(long_ids()[:, :11]).logits, plain(long_ids()[:, :11]).logits, 2e-5)


def test_a_convolution_between_blocks_is_no_writer_that_a_point_holds() -> None:
    hooked = am.load(models.randomised(VARIANTS["convolution"]()))
    assert "chain" not in {check.name for check in hooked.certificate.checks}
    with pytest.raises(UnsupportedModelError, match="DeBERTa-v2's convolution after the first"):
        am.decompose_by_source(hooked, long_ids())


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_of_rows_are_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = models.hooked(name, F64)
    whole = hooked.run(long_ids()).logits
    monkeypatch.setattr(attention, "block_bytes", lambda device: 1)
    close(hooked.run(long_ids()).logits, whole, 1e-12)
    assert am.decompose_scores(hooked, long_ids()).residual.max() < 1e-13


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("which", ["q", "k"])
def test_a_hook_on_queries_or_keys_changes_the_products_with_positions_too(which: str, share: bool) -> None:
    plain, ids = models.randomised(models.deberta_v2(share_att_key=share)), long_ids()[:, :13]
    hooked = am.load(plain)
    with hooked.hooks({(which, 1): lambda value: 0.4 * value.flip(1)}):
        ours = hooked.run(ids, points=["pattern", "logits"])
    projection = plain.deberta.encoder.layer[1].attention.self.get_submodule(
        "query_proj" if which == "q" else "key_proj"
    )

    def changed(module: Any, args: Any, output: Tensor) -> Tensor | None:
        return 0.4 * output.flip(1) if output.shape[1] == ids.shape[1] else None  # not the relative positions

    with projection.register_forward_hook(changed), torch.no_grad():
        theirs = plain(ids, output_attentions=True)
    close(ours["pattern", 1], theirs.attentions[1], 1e-5)
    close(ours.logits, theirs.logits, 2e-5)


# -- the ledger ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_on_texts_beyond_the_linear_buckets_each_term_is_that_of_the_raw_weights(name: str) -> None:
    plain, hooked, ids = models.plain(name, F64), models.hooked(name, F64), long_ids()[:1, :19]
    split, stream = am.decompose_scores(hooked, ids), hooked.run(ids, points=["attn_in"])
    for layer in range(2):
        expected = reference.relative_terms(plain, layer, stream["attn_in", layer])
        assert set(expected) == set(RELATIVE)
        for term, value in expected.items():
            close(split.terms[term][:, layer], value, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_split_at_means_what_they_make_of_a_distance_is_position(name: str) -> None:
    plain, hooked, ids = models.plain(name, F64), models.hooked(name, F64), long_ids()[:1, :9]
    split, acts = am.decompose_scores(hooked, ids, centre="mean"), hooked.run(ids, points=["q", "k"])
    for layer in range(2):
        tables = reference.relative_tables(plain, layer)
        q, k = acts["q", layer][0], acts["k", layer][0]
        mean_q, mean_k = q[1:].mean(0), k[1:].mean(0)
        expected = {each: torch.zeros(len(mean_q), 9, 9, dtype=F64) for each in ("position", *RELATIVE)}
        for i in range(9):
            for j in range(9):
                row = reference.relative_row(plain.config, i - j)
                keys, queries = tables["c2p"][row], tables["p2c"][row]
                here = (mean_q * mean_k + mean_q * keys + mean_k * queries, (q[i] - mean_q) * keys,
                        (k[j] - mean_k) * queries)  # fmt: skip
                for each, value in zip(expected, here, strict=True):
                    expected[each][:, i, j] = value.sum(-1) * reference.scale(plain)
        for each, value in expected.items():
            close(split.terms[each][0, layer], value, 1e-12)


def test_dropping_a_term_is_dropping_its_projection() -> None:
    hooked, ids = am.load(models.randomised(models.deberta_v2(share_att_key=False))), long_ids()[:, :13]
    for term, name in zip(RELATIVE, ("pos_key_proj", "pos_query_proj"), strict=True):
        with hooked.intervene(am.Intervention.scale(term)):
            ours = hooked.run(ids).logits
        without = models.randomised(models.deberta_v2(share_att_key=False))
        with torch.no_grad():
            for layer in without.deberta.encoder.layer:
                for parameter in layer.attention.self.get_submodule(name).parameters():
                    parameter.zero_()
            theirs = without(ids).logits
        close(ours, theirs, 2e-5)
        assert float((ours - hooked.run(ids).logits).abs().max()) > 0.1


# -- buckets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buckets", "largest"), [(4, 6), (256, 512), (32, 40), (8, 512)])
def test_buckets_are_those_of_transformers(buckets: int, largest: int) -> None:
    distances = torch.arange(-700, 700)
    theirs = make_log_bucket_position(distances, buckets, largest).long().tolist()
    assert [log_bucket(each, buckets, largest) for each in distances.tolist()] == theirs
    config = models.deberta_v2(position_buckets=buckets, max_relative_positions=largest).config
    assert [row_of_distance(config, each) for each in distances.tolist()] == [
        min(max(each + buckets, 0), 2 * buckets - 1) for each in theirs
    ]


# -- what is broken is found ---------------------------------------------------------------------------------


def broken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, transposed = DisentangledAttention._relative, Relative.content_of

    def shifted(self: Any, *given: Any) -> Any:
        found = made(self, *given)
        return replace(found, place=(found.place + 1).clamp(max=int(found.place.max())))

    def far(self: Any, *given: Any) -> Any:
        found = made(self, *given)
        distance = torch.arange(len(found.place)) - found.zero
        return replace(found, place=torch.where(distance > 110, found.place - 1, found.place))

    def upside_down(self: Any, by_key: Tensor, rows: slice = slice(None)) -> Tensor:
        return transposed(self, by_key).mT[:, :, rows]

    if kind in ("bucket", "far"):
        monkeypatch.setattr(DisentangledAttention, "_relative", shifted if kind == "bucket" else far)
    elif kind == "transposed":
        monkeypatch.setattr(Relative, "content_of", upside_down)
    else:
        monkeypatch.setattr(DisentangledAttention, "products", 2)


@pytest.mark.filterwarnings("ignore::attnmech.model.files.load.UnprovenWarning")
@pytest.mark.parametrize("kind", ["bucket", "transposed", "scale"])
def test_the_certificate_finds_a_reading_that_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(kind, monkeypatch)
    hooked = am.load(models.fresh("deberta_v2"))
    assert {"relative positions", "attentions", "transformers"} <= set(failing(hooked))
    with pytest.raises(CertificateError, match=r"relative positions|transformers"):
        am.decompose_scores(hooked, long_ids())


@pytest.mark.filterwarnings("ignore::attnmech.model.files.load.UnprovenWarning")
def test_the_certificate_looks_beyond_the_linear_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    broken("far", monkeypatch)
    hooked = am.load(models.randomised(models.deberta_v2(position_buckets=250, max_relative_positions=300)))
    assert failing(hooked).keys() == {"relative positions"}
    assert "layer 0 in texts of 141 tokens" in failing(hooked)["relative positions"]
