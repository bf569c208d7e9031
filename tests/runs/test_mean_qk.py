"""Mean queries and keys against loops over captured ones; shards, files, equality; what interventions do with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import centred
import models
import pytest
import torch
from centred import F32, F64, LENGTHS, documents
from comparing import close, refuses
from torch import Tensor

import attnmech as am
from attnmech import Intervention
from attnmech.errors import InputError
from attnmech.interventions.edits import Scale

WITH_ONE_TOKEN = [*LENGTHS[:-1], 1]


@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize("per_position", [False, True])
@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2", "qwen3_bias"])
def test_means_are_those_of_captured_queries_and_keys(name: str, per_position: bool) -> None:
    model, texts = models.hooked(name, F64), documents(WITH_ONE_TOKEN)
    found = am.mean_qk(model, iter(texts), per_position=per_position)
    places = 16 if per_position else 1
    for layer in range(model.n_layers):
        parts = [centred.split_of(name, model, text[None], layer) for text in texts]
        for role, mean, counts in (
            ("q", found.mean_query[layer], found.query_counts),
            ("k", found.mean_key[layer], found.key_counts),
        ):
            values = [getattr(part, role)[0] for part in parts]
            if not per_position:
                rows = {0: [row for value in values for row in value[1:]]}
            else:
                rows = {at: [value[at] for value in values if len(value) > at] for at in range(places)}
            assert counts.tolist() == [len(rows[at]) for at in range(places)]
            for at in range(places):
                close(mean[at], sum(rows[at][1:], rows[at][0]) / len(rows[at]), 1e-11)
    assert found.layers == tuple(range(model.n_layers)) and len(found.texts) == len(texts)
    assert bool((found.texts.diff() >= 0).all())


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_text_with_default_inputs_is_taken_out_of_its_means(name: str) -> None:
    """Inputs as tokenizers return them: with token types that are all 0, or with default positions."""
    model, ids = models.hooked(name, F64), models.token_ids(name, batch=4, length=7)
    means = am.mean_qk(model, list(ids))
    given: dict[str, Tensor] = {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
    given |= {"token_type_ids": 0 * ids[:1]} if name == "bert" else {"position_ids": torch.arange(7)[None]}
    with_them, alone = (am.decompose_scores(model, each, centre=means) for each in (given, ids[:1]))
    for term, value in with_them.terms.items():
        close(value, alone.terms[term], 1e-12)


def test_means_of_other_runs_are_not_merged() -> None:
    """Those of shards are the whole: tests/methods/test_corpora.py."""
    model, texts = models.hooked("llama", F64), documents(WITH_ONE_TOKEN)
    whole, part = (am.mean_qk(model, iter(texts), shard=shard) for shard in ((0, 1), (1, 3)))
    calls: list[tuple[Any, str]] = [
        (lambda: part.merged(whole), "share documents"),
        (lambda: am.mean_qk(model, torch.stack([texts[0]] * 2)).merged(part), "only if their corpus is known"),
        (lambda: part.merged(am.mean_qk(models.hooked("llama"), iter(texts), shard=(0, 3))), "same model, layers"),
        (lambda: part.merged(3), "can only be merged with means"),  # type: ignore[arg-type]
    ]
    for call, said in calls:
        refuses(said, call)


@pytest.mark.usefixtures("unchecked")
def test_nothing_to_take_a_mean_over() -> None:
    model = models.hooked("llama")
    refuses("only first and special tokens", am.mean_qk, model, torch.tensor([[5]]))
    refuses("`per_position` must be True or False", am.mean_qk, model, models.token_ids("llama"), per_position="token")
    tokenized = am.load(models.fresh("llama"), tokenizer=models.tokenizer(adds_bos=True))
    refuses("only first and special tokens", am.mean_qk, tokenized, "[PAD]")


def test_equal_where_they_hold_the_same() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    one, same = am.mean_qk(model, ids), am.mean_qk(model, ids)
    assert one == same and hash(one) == hash(same) and one.digest == same.digest and len({one, same}) == 1
    moved = one.query_sums.clone()
    moved[0, 0, 0, 0] += 1e-9
    others = [
        replace(one, query_sums=moved),
        replace(one, key_sums=one.key_sums * 2),
        replace(one, query_counts=one.query_counts + 1),
        replace(one, key_counts=one.key_counts + 1),
        replace(one, texts=one.texts[:-1]),
        replace(one, per_position=True),
        replace(one, layers=(1, 0)),
        replace(one, stack="encoder"),
        am.mean_qk(am.load(models.fresh("llama", seed=1)), ids),
    ]
    assert len({one, *others}) == len(others) + 1 and one != "means"


@pytest.mark.parametrize("per_position", [False, True])
def test_saved_and_loaded(per_position: bool, tmp_path: Path) -> None:
    model, ids = models.hooked("gemma2"), models.token_ids("gemma2", 4, 6)
    means = am.mean_qk(model, ids, per_position=per_position, layers=[1])
    loaded = am.load_result(means.save(tmp_path / "means.safetensors"))
    assert loaded == means and loaded.provenance.to_dict() == means.provenance.to_dict() and repr(loaded) == repr(means)
    frame = means.to_frame()
    assert len(frame) == 6 * (6 if per_position else 1) and ("position" in frame) == per_position
    last = frame.iloc[-1]
    assert last.mean_query_norm == pytest.approx(float(means.mean_query[0, -1, 5].norm()))
    assert last.mean_key_norm == pytest.approx(float(means.mean_key[0, -1, 1].norm()))
    assert last.queries == int(means.query_counts[-1])


def test_an_intervention_with_means_is_a_value(tmp_path: Path) -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    means, other = am.mean_qk(model, ids), am.mean_qk(model, ids[:2])
    one, same = (Intervention.scale("position", 0.5, [(1, 2)], centre=am.mean_qk(model, ids)) for _ in range(2))
    assert one == same and hash(one) == hash(same) and one.digest == same.digest
    for different in (
        Intervention.scale("position", 0.5, [(1, 2)]),
        Intervention.scale("position", 0.5, [(1, 2)], centre=other),
    ):
        assert one != different and one.digest != different.digest
    assert str(one) == f"position in the scores of L1H2, split at {means}, is multiplied by 0.5"
    loaded = Intervention.load(one.save(tmp_path / "scale.safetensors"))
    assert (
        loaded == one and loaded.digest == one.digest and isinstance(loaded.edit, Scale) and loaded.edit.centre == means
    )
    assert loaded.edit.centre.provenance.to_dict() == means.provenance.to_dict()
    with model.intervene(one):
        changed = model.run(ids, points=["pattern"])["pattern"]
    with model.intervene(loaded):
        assert torch.equal(model.run(ids, points=["pattern"])["pattern"], changed)


def attention_to_previous(model: am.HookedModel, ids: Tensor, *changes: Intervention) -> float:
    with model.intervene(*changes):
        pattern = model.run(ids, points=["pattern"])["pattern", 0][:, 1]
    return float(pattern.diagonal(offset=-1, dim1=1, dim2=2)[:, 3:].mean())


CASES = ("llama", "gpt_neox", "gptj", "gemma2", "gpt_oss_yarn", "bloom", "gpt2", "qwen3_bias")


@pytest.mark.parametrize("name", CASES)
def test_a_scaled_term_is_scaled_inside_the_softmax(name: str) -> None:
    dtype = F32 if name == "gpt_oss_yarn" else F64
    model, inputs = models.hooked(name, dtype), models.padded("gptj", "right")
    given = {"input_ids": models.token_ids("gptj", 5, 6, seed=6), "attention_mask": torch.ones(5, 6, dtype=torch.long)}
    means, native = am.mean_qk(model, given), am.decompose_scores(model, inputs)
    clean = model.run(inputs, points=["scores"])["scores", 0].double()
    split = centred.split_of(name, model, inputs, 0)
    own = native.terms["position"][:, 0] if "position" in native.terms else None
    q_mean, k_mean = (
        mean[0, 0].to(dtype).expand_as(value)
        for mean, value in ((means.mean_query, split.q), (means.mean_key, split.k))
    )
    terms = centred.naive_terms(split, q_mean, k_mean, own)
    seen = native.visible[:, 0].expand_as(clean)
    cap = getattr(models.plain(name).config, "attn_logit_softcapping", None)
    for term, factor in (("position", 0.0), ("query_key", -0.5), ("key_bias", 2.0), ("query_bias", 0.0)):
        chosen = [0, model.n_heads - 1]
        by = torch.zeros(model.n_heads).double()
        by[chosen] = factor - 1
        raw = sum(value.double() for value in terms.values()) + by[:, None, None] * terms[term].double()
        score = cap * torch.tanh(raw / cap) if cap else raw
        score = score.masked_fill(~seen, -torch.inf)
        if native.sink is not None:
            sink = native.sink[0].double()[None, :, None, None].expand(*score.shape[:3], 1)
            score = torch.cat((score, sink), dim=-1)
        expected = score.softmax(dim=-1)[..., :7].nan_to_num(0.0)
        change = Intervention.scale(term, factor, [(0, head) for head in chosen], centre=means)
        with model.intervene(change):
            pattern = model.run(inputs, points=["pattern"])["pattern", 0].double()
        rows = native.real[:, None, :, None].expand_as(pattern)
        close(pattern[rows], expected[rows], 1e-6 if dtype == F32 else 1e-7)


@pytest.mark.parametrize("per_position", [False, True])
def test_later_tokens_do_not_change_earlier_ones(per_position: bool) -> None:
    model, ids = models.hooked("llama", F64), models.token_ids("llama", 54, 6)
    means = am.mean_qk(model, ids, per_position=per_position)
    # The first text is part of the means; its changed version is not.
    text, other = ids[:1], ids[:1].clone()
    other[0, 4:] = (other[0, 4:] + 5) % 40 + 3
    for term in ("position", "query_key", "key_bias", "query_bias"):
        with model.intervene(Intervention.scale(term, 0.0, centre=means)):
            one, two = (model.run(each, points=["resid_post", "logits"]) for each in (text, other))
        for point, layer in (("resid_post", 0), ("resid_post", 1)):
            assert torch.equal(one[point, layer][:, :4], two[point, layer][:, :4])
        assert not torch.equal(one["resid_post", 1][:, 4:], two["resid_post", 1][:, 4:])


def test_a_head_found_in_the_stream_loses_its_previous_token() -> None:
    model, heads = centred.in_the_stream(), [(0, 1)]
    corpus = torch.randint(3, 53, (60, 8), generator=torch.Generator().manual_seed(2))
    ids = torch.randint(3, 53, (3, 8), generator=torch.Generator().manual_seed(4))
    means = am.mean_qk(model, corpus, per_position=True)
    assert attention_to_previous(model, ids) > 0.8
    assert attention_to_previous(model, ids, Intervention.scale("position", 0.0, heads, centre=means)) < 0.3
    assert attention_to_previous(model, ids, Intervention.scale("query_key", 0.0, heads, centre=means)) > 0.75
    with (
        pytest.raises(InputError, match="texts of up to 8 tokens; got one of 9"),
        model.intervene(Intervention.scale("position", 0.0, heads, centre=means)),
    ):
        model.run(torch.randint(3, 53, (1, 9)))


@pytest.mark.usefixtures("unchecked")
def test_what_an_intervention_refuses() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama", 3, 6)
    means = am.mean_qk(model, ids)

    def runs(centre: am.results.MeanQK, on: am.HookedModel = model, **options: Any) -> None:
        with on.intervene(Intervention.scale("position", 0.0, centre=centre, **options)):
            on.run(ids)

    bad: list[tuple[Any, str]] = [
        (lambda: Intervention.scale("position", centre="mean"), "`centre` must be fixed means.*later tokens"),
        (lambda: Intervention.scale("position", centre="position"), "`centre` must be fixed means"),
        (lambda: Intervention.scale("position", centre=means.query_sums), "`centre` must be fixed means"),
        (lambda: runs(means, am.load(models.fresh("llama", seed=1))), "not on this model"),
        (lambda: runs(means, models.hooked("gpt2")), "the means are of 6 heads of the stack ''"),
        (lambda: runs(replace(means, query_sums=means.query_sums * torch.nan)), "must be finite; `query_sums`"),
        (lambda: runs(am.mean_qk(model, ids, layers=[1])), r"of layers \[1\]; there are none for \[0\]"),
        (lambda: runs(replace(means, query_counts=0 * means.query_counts)), "are only over tokens|no rows|no token"),
        (
            lambda: runs(am.mean_qk(model, ids, per_position=True)),
            "needs 50 other texts that reach it; position 0 of text 0 has 3",
        ),
    ]
    for call, said in bad:
        refuses(said, call)
    model.run(ids)
    runs(am.mean_qk(model, ids, layers=[1]), heads=[(1, 0)])
    with (
        pytest.raises(InputError, match="no such term; they have query_key, key_bias, query_bias, position"),
        model.intervene(Intervention.scale("constant", 0.0, centre=means)),
    ):
        model.run(ids)


def test_the_means_of_a_run_with_hooks_are_others() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    clean = am.mean_qk(model, ids)
    with model.hooks({("resid_pre", 1): lambda x: x * 2 + torch.arange(36.0)}):
        changed = am.mean_qk(model, ids)
    assert changed != clean and changed.provenance.edits
    torch.testing.assert_close(changed.query_sums[0], clean.query_sums[0], rtol=0, atol=0)
