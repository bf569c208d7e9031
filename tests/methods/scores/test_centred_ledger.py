"""Scores split at means, against the same terms from the captured queries and keys and rotation matrices."""

from dataclasses import replace
from typing import Any

import centred
import models
import pytest
import torch
from centred import F64, dtype_of
from comparing import close, refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

FAMILIES = (
    "llama", "gptj", "gpt_neox", "gemma2", "gemma3", "gpt_oss_yarn", "qwen3_bias", "cohere", "llama4_text", "bloom",
    "gpt2", "bert",
)  # fmt: skip
TERMS = ("query_key", "key_bias", "query_bias", "position")


def inputs_of(name: str, side: str) -> dict[str, Tensor]:
    """Texts of 7, 5 and 3 tokens, padded on one side."""
    given = models.padded("llama", side)
    return given if name not in ("gptj", "llama4_text") else {**given, "input_ids": given["input_ids"] % 40 + 3}


def expected_terms(
    name: str, model: am.HookedModel, inputs: Any, layer: int, native: am.results.ScoreDecomposition
) -> dict[str, Tensor]:
    split, counted = centred.split_of(name, model, inputs, layer), centred.without_first(inputs["attention_mask"])
    own = native.terms["position"][:, layer] if "position" in native.terms else None
    return centred.naive_terms(split, centred.own_means(split.q, counted), centred.own_means(split.k, counted), own)


@pytest.mark.parametrize(
    ("name", "side"),
    [(name, "right") for name in FAMILIES] + [(name, "left") for name in ("llama", "gptj", "gemma2", "bloom")],
)
def test_every_term_is_what_captured_queries_and_keys_give(name: str, side: str) -> None:
    dtype = dtype_of(name)
    tolerance = 1e-12 if dtype == F64 else 1e-5
    model, inputs = centred.hooked(name, dtype), inputs_of(name, side)
    split, native = am.decompose_scores(model, inputs, centre="mean"), am.decompose_scores(model, inputs)
    assert set(split.terms) - {"softcap", "mask"} == set(TERMS)
    assert ("softcap" in split.terms) == (name == "gemma2")
    real = inputs["attention_mask"].bool()
    both = real[:, None, :, None] & real[:, None, None, :]
    for layer in range(model.n_layers):
        expected = expected_terms(name, model, inputs, layer, native)
        size = max(float(native.largest[layer].max()), float(torch.stack([*expected.values()]).abs().max()))
        for term, value in expected.items():
            keep = both.expand_as(value)
            close(split.terms[term][:, layer].expand_as(value)[keep], value[keep], tolerance, size)
        total, other = (
            sum(each.terms[term][:, layer].expand_as(value) for term in each.terms if term != "mask")
            for each in (split, native)
        )
        close(total[both.expand_as(total)], other[both.expand_as(total)], tolerance, size)


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_stacks_of_t5_split_at_their_own_tokens(stack: str) -> None:
    model, inputs = models.hooked("t5", F64), models.inputs_of("t5")
    split = am.decompose_scores(model, inputs, stack=stack, centre="mean")
    native = am.decompose_scores(model, inputs, stack=stack)
    source, target = inputs["attention_mask"].bool(), torch.ones(3, 5, dtype=torch.bool)
    queries = source if stack == "encoder" else target
    keys = target if stack == "decoder" else source
    for layer in range(len(split.layers)):
        parts = centred.split_of("t5", model, inputs, layer, stack)
        own = native.terms["position"][:, layer] if "position" in native.terms else None
        expected = centred.naive_terms(
            parts,
            centred.own_means(parts.q, centred.without_first(queries)),
            centred.own_means(parts.k, centred.without_first(keys)),
            own,
        )
        both = (queries[:, None, :, None] & keys[:, None, None, :]).expand_as(expected["query_key"])
        for term, value in expected.items():
            close(split.terms[term][:, layer].expand_as(value)[both], value[both], 1e-12)


def test_special_tokens_are_not_in_the_means() -> None:
    model = am.load(models.fresh("llama", F64), tokenizer=models.tokenizer(adds_bos=True))
    batch = model.encode(["the keys to nowhere are here", "a dog"])
    assert batch.ids[0].tolist() == [2, 3, 4, 5, 1, 7, 8] and not batch.is_special[0, 4] and batch.first[:, 0].all()
    assert batch.first.sum() == 2 and batch.begins.tolist() == [0, 0]
    counted = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]).bool()
    split = am.decompose_scores(model, batch, centre="mean")
    assert split.reference is not None and split.reference.tokens == (6, 2)
    for layer in range(2):
        parts = centred.split_of("llama", model, batch, layer)
        means = centred.own_means(parts.q, counted), centred.own_means(parts.k, counted)
        for term, value in centred.naive_terms(parts, *means).items():
            close(split.terms[term][0, layer], value[0], 1e-12)
            close(split.terms[term][1, layer, :, :3, :3], value[1, :, :3, :3], 1e-12)


@pytest.mark.core
@pytest.mark.parametrize("name", ["bloom", "gpt_neox", "qwen2", "llama_bias"])
def test_split_at_the_biases_it_is_the_native_ledger(name: str) -> None:
    model, inputs = models.hooked(name, F64), inputs_of(name, "right")
    means = centred.at_biases(name, model, inputs)
    split, native = am.decompose_scores(model, inputs, centre=means), am.decompose_scores(model, inputs)
    assert "constant" in native.terms and "constant" not in split.terms
    for term in ("query_key", "key_bias", "query_bias"):
        close(split.terms[term].expand_as(native.terms[term]), native.terms[term], 1e-12)
    position = native.terms["constant"]
    if "position" in native.terms:
        position = position + native.terms["position"]
    close(split.terms["position"].expand_as(position), position, 1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
def test_a_text_is_taken_out_of_the_reference_it_is_in(name: str) -> None:
    model, ids = models.hooked(name, F64), models.token_ids(name, 5, 6)
    twice = torch.cat((ids, ids[1:2]))
    means = am.mean_qk(model, twice)
    assert means.times(model.encode(ids).digests).tolist() == [1, 2, 1, 1, 1]
    for text, others in ((0, [1, 2, 3, 4, 5]), (1, [0, 2, 3, 4])):
        rest = am.mean_qk(model, twice[others])
        assert rest.times(model.encode(ids[text][None]).digests).tolist() == [0]
        one, other = (am.decompose_scores(model, ids[text][None], centre=each) for each in (means, rest))
        kept = am.decompose_scores(model, ids[text][None], centre=replace(means, texts=means.texts[:0]))
        for term in TERMS:
            close(one.terms[term], other.terms[term], 1e-12, float(one.largest.max()))
        assert float((kept.terms["key_bias"] - one.terms["key_bias"]).abs().max()) > 1e-3


def test_a_text_is_known_whatever_stands_beside_it() -> None:
    model, ids = models.hooked("llama", F64), models.token_ids("llama", 3, 6)
    means = am.mean_qk(model, ids)
    for side in ("right", "left"):
        longer, mask = torch.full((1, 9), 5), torch.zeros(1, 9, dtype=torch.long)
        here = slice(0, 6) if side == "right" else slice(3, 9)
        longer[0, here], mask[0, here] = ids[1], 1
        batch = model.encode({"input_ids": longer, "attention_mask": mask})
        assert means.times(batch.digests).tolist() == [1]
    places = torch.arange(6)[None]
    shared = model.encode({"input_ids": ids, "position_ids": places})
    alone = model.encode({"input_ids": ids[:1], "position_ids": places})
    assert shared.digests[0] == alone.digests[0]


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_a_text_of_t5_is_taken_out_of_the_reference(stack: str) -> None:
    model, inputs = models.hooked("t5", F64), models.inputs_of("t5")
    first, rest = ({name: value[rows] for name, value in inputs.items()} for rows in (slice(0, 1), slice(1, 3)))
    means, others = (am.mean_qk(model, given, stack=stack) for given in (inputs, rest))
    one, other = (am.decompose_scores(model, first, stack=stack, centre=each) for each in (means, others))
    for term in TERMS:
        close(one.terms[term], other.terms[term], 1e-12, float(one.largest.max()))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_means_by_position_leave_each_text_out(name: str) -> None:
    model, ids = models.hooked(name, F64), models.token_ids(name, 54, 6)
    mask = torch.ones_like(ids)
    mask[:3, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    split = am.decompose_scores(model, inputs, layers=[1], centre="position")
    fixed = am.decompose_scores(model, inputs, layers=[1], centre=am.mean_qk(model, inputs, per_position=True))
    parts = centred.split_of(name, model, inputs, 1)
    means = []
    for value in (parts.q, parts.k):
        mean = torch.zeros_like(value)
        for text in range(54):
            for place in range(6):
                rows = [value[n, place] for n in range(54) if n != text and mask[n, place]]
                mean[text, place] = sum(rows[1:], rows[0]) / len(rows)
        means.append(mean)
    expected = centred.naive_terms(parts, *means)
    both = mask.bool()[:, None, :, None] & mask.bool()[:, None, None, :]
    for term, value in expected.items():
        keep = both.expand_as(value)
        for found in (split, fixed):
            close(found.terms[term][:, 0].expand_as(value)[keep], value[keep], 1e-11)


def test_left_padding_does_not_move_positions() -> None:
    model, ids = models.hooked("llama", F64), models.token_ids("llama", 52, 5)
    left = torch.cat((torch.zeros(52, 2, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(52, 2, dtype=torch.long), torch.ones_like(ids)), dim=1)
    for centre in ("position", am.mean_qk(model, ids, per_position=True)):
        plain = am.decompose_scores(model, ids, centre=centre)
        moved = am.decompose_scores(model, {"input_ids": left, "attention_mask": mask}, centre=centre)
        for term in TERMS:
            close(moved.terms[term][..., 2:, 2:], plain.terms[term], 1e-6)


def test_too_few_texts_at_a_position_are_refused_with_their_number() -> None:
    model, ids = models.hooked("gpt2", F64), models.token_ids("gpt2", 51, 6)
    assert am.decompose_scores(model, ids, centre="position").reference is not None
    with pytest.raises(InputError, match=r"needs 50 other texts that reach it; position 0 of text 0 has 49\. "):
        am.decompose_scores(model, ids[:50], centre="position")
    mask = torch.ones_like(ids)
    mask[7:, 4:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    refuses(r"position 4 of text 0 has 6\.", am.decompose_scores, model, given, centre="position")
    means = am.mean_qk(model, ids, per_position=True)
    text = models.token_ids("gpt2", 1, 7, seed=9)
    refuses("the means are for texts of up to 6 tokens; got one of 7", am.decompose_scores, model, text, centre=means)
    assert am.decompose_scores(model, text[:, :6], centre=means).reference is not None
    few = am.mean_qk(model, ids[:40], per_position=True)
    refuses("has 40", am.decompose_scores, model, text[:, :5], centre=few)


def test_notes_say_where_scores_are_split() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama", 2, 5)
    means = am.mean_qk(model, models.token_ids("llama", 4, 6, seed=8))
    said = am.decompose_scores(model, ids, centre="mean").numbers().notes
    assert "over 4 of its tokens" in said[0] and "the split is rough" in said[0]
    said = am.decompose_scores(model, ids, centre=means).numbers().notes
    assert f"the means of 4 texts ({means.digest[:8]})" in said[0] and "rough" not in said[0]


def test_contrasts_add_up_and_name_position() -> None:
    model, ids = models.hooked("llama", F64), models.token_ids("llama", 1, 6)
    split, native = (am.decompose_scores(model, ids, centre=centre) for centre in ("mean", None))
    one, other = (each.contrast(query=5, key_a=4, key_b=1) for each in (split, native))
    torch.testing.assert_close(one.total, other.total, rtol=0, atol=1e-12)
    assert "position" in one.explain(layer=1, head=2) and "position" not in other.explain(layer=1, head=2)


@pytest.mark.usefixtures("unchecked")
def test_means_that_do_not_fit_are_refused() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama", 3, 6)
    means = am.mean_qk(model, ids)
    other = am.load(models.fresh("llama", seed=1))

    def refused(said: str, centre: Any, given: Any = ids, on: am.HookedModel = model, **options: Any) -> None:
        for call in (am.decompose_scores, am.variance_shares):
            refuses(said, call, on, given, centre=centre, **options)

    refused(r"the means were taken on 'LlamaForCausalLM', weights .* take them again", means, on=other)
    refused("`query_sums` holds NaN", replace(means, query_sums=means.query_sums * torch.nan))
    refused("`key_sums` holds NaN", replace(means, key_sums=means.key_sums + torch.inf))
    refused(r"are of layers \[1\]; there are none for \[0\]", am.mean_qk(model, ids, layers=[1]))
    none = replace(means, query_counts=means.query_counts * 0, key_counts=means.key_counts * 0)
    refused("only over tokens of the text", none)
    refused("only over tokens of the text", am.mean_qk(model, ids[:1]), ids[:1])
    refused('must be None, "mean", "position"', "median")
    refused('must be None, "mean", "position"', 3)
    refused(
        r"text 1 has only its first and special tokens", "mean", {"input_ids": ids, "attention_mask": one_token(ids)}
    )
    refused("6 heads of the stack ''", means, on=models.hooked("gpt2"))
    refuses("give only one of the two", am.decompose_scores, model, ids, centre="mean", fold_norm=True)


def one_token(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    return mask
