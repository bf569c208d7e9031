"""Shares of variance against a loop over rows and keys; corpora, shards and journals give the same numbers."""

import math
from typing import Any

import models
import naive
import numpy as np
import pytest
import torch
from centred import F64, documents
from comparing import refuses
from scipy.stats import spearmanr

import attnmech as am
from attnmech.errors import ExactnessError, InputError
from attnmech.methods.scores.variance_shares import ALL_TERMS


def sums_by_hand(
    split: am.results.ScoreDecomposition, text: int, *, first_key: bool = True, first_row: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Σ_rows Σ_j (t − t̄)(s − s̄) of each term, and Σ_rows Σ_j (s − s̄)², `[layer head]`, cell by cell."""
    batch, length = split.real.shape
    layers, heads = len(split.layers), split.residual.shape[1]
    names = [name for name in split.terms if name != "mask"]
    terms = {name: split.terms[name].expand(batch, layers, heads, length, length).numpy() for name in names}
    visible, start = split.visible.numpy(), int(split.real[text].nonzero()[0, 0])
    above = {name: np.zeros((layers, heads)) for name in names}
    below = np.zeros((layers, heads))
    for layer in range(layers):
        for row in range(length):
            seen = [j for j in range(length) if visible[text, layer, 0, row, j] and (first_key or j != start)]
            if len(seen) < 2 or (row == start and not first_row):
                continue
            for head in range(heads):
                at = {name: [float(terms[name][text, layer, head, row, j]) for j in seen] for name in names}
                score = [sum(at[name][n] for name in names) for n in range(len(seen))]
                mean = sum(score) / len(seen)
                below[layer, head] += sum((s - mean) ** 2 for s in score)
                for name in names:
                    own = sum(at[name]) / len(seen)
                    above[name][layer, head] += sum(
                        (t - own) * (s - mean) for t, s in zip(at[name], score, strict=True)
                    )
    return above, below


def shares_by_hand(splits: list[tuple[am.results.ScoreDecomposition, int]], **options: Any) -> dict[str, np.ndarray]:
    found = [sums_by_hand(split, text, **options) for split, text in splits]
    below = sum(each for _, each in found)
    with np.errstate(invalid="ignore"):
        return {name: sum(above[name] for above, _ in found) / below for name in found[0][0]}


def check(found: am.results.VarianceShares, expected: dict[str, np.ndarray], tolerance: float) -> None:
    for place, name in enumerate(ALL_TERMS):
        value = expected.get(name, np.zeros_like(next(iter(expected.values()))))
        np.testing.assert_allclose(found.shares[place].numpy(), value, rtol=0, atol=tolerance)
    total = found.shares.sum(dim=0)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=tolerance)


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("llama", "left"),
        ("bloom", "right"),
        ("bloom", "left"),
        ("gemma2", "right"),
        ("bert", "right"),
        ("gptj", "left"),
    ],
)
def test_shares_are_those_of_the_definition(name: str, side: str) -> None:
    model, inputs = models.hooked(name, F64), models.padded("gptj", side)
    split = am.decompose_scores(model, inputs, centre="mean")
    texts = [(split, text) for text in range(3)]
    # In a bidirectional model, a text's first row counts in the decomposition, but by default not in results by row.
    whole = shares_by_hand(texts, first_row=True)
    for term, value in whole.items():
        np.testing.assert_allclose(split.variance_shares[term].numpy(), value, rtol=0, atol=1e-11)
    assert set(split.variance_shares) == set(split.terms) - {"mask"}
    without = am.variance_shares(model, inputs, first_key=False)
    check(without, shares_by_hand(texts, first_key=False), 1e-11)
    found = am.variance_shares(model, inputs)
    check(found, shares_by_hand(texts), 1e-11)
    np.testing.assert_allclose(found.where(first_row=True).shares[0].numpy(), whole["position"], rtol=0, atol=1e-11)
    assert found.documents == 3 and found.centre == "mean" and found.first_key and not without.first_key
    assert set(found.terms) <= set(split.terms)


def test_the_models_own_split_has_shares_too() -> None:
    model, inputs = models.hooked("gpt_neox", F64), models.padded("gpt_neox")
    split = am.decompose_scores(model, inputs)
    found = am.variance_shares(model, inputs, centre=None)
    check(found, shares_by_hand([(split, text) for text in range(3)]), 1e-11)
    assert found.centre == "None" and "constant" in found.terms and "position" not in found.terms


def test_no_variance_is_no_share() -> None:
    model = models.fresh("llama", F64)
    with torch.no_grad():
        models.blocks_of(model)[1].self_attn.q_proj.weight[:8] = 0
    hooked = am.load(model)
    found = am.variance_shares(hooked, models.token_ids("llama"))
    assert bool(found.shares[:, 1, 0].isnan().all()) and bool(found.shares[:, 0].isfinite().all())
    assert bool(found.shares[:, 1, 1:].isfinite().all())
    one = am.variance_shares(models.hooked("llama"), torch.tensor([[5, 6]]), first_key=False)
    assert bool(one.shares.isnan().all())
    split = am.decompose_scores(hooked, models.token_ids("llama"), centre="mean")
    assert math.isnan(float(split.variance_shares["position"][1, 0]))


def test_means_by_position_of_texts_together_or_of_a_corpus() -> None:
    model, ids = models.hooked("gpt2", F64), models.token_ids("gpt2", 54, 5)
    together, split = (
        am.variance_shares(model, ids, centre="position"),
        am.decompose_scores(model, ids, centre="position"),
    )
    np.testing.assert_allclose(together.shares[0].numpy(), split.variance_shares["position"].numpy(), atol=1e-10)
    means = am.mean_qk(model, iter([*ids]), per_position=True)
    streamed = am.variance_shares(model, iter([*ids]), centre=means)
    torch.testing.assert_close(streamed.shares, together.shares, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("many_batches")
def test_a_corpus_is_the_sum_of_its_texts() -> None:
    model, texts = models.hooked("llama", F64), documents()
    found = am.variance_shares(model, iter(texts))
    splits = [(am.decompose_scores(model, text[None], centre="mean"), 0) for text in texts]
    check(found, shares_by_hand(splits), 1e-10)
    assert found.documents == len(texts)
    low, high = found["position"].interval() or ()
    sums = [sums_by_hand(split, 0) for split, _ in splits]
    for layer, head in ((0, 4), (1, 1)):
        above = [each["position"][layer, head] for each, _ in sums]
        ends = naive.t_interval(above, [below[layer, head] for _, below in sums])
        assert (float(low[layer, head]), float(high[layer, head])) == pytest.approx(ends, abs=1e-9)

    halves = [shares_by_hand(splits[odd::2]) for odd in (0, 1)]
    for half, expected in zip(found.half_shares, halves, strict=True):
        for place, name in enumerate(ALL_TERMS[:4]):
            np.testing.assert_allclose(half[place].numpy(), expected[name], rtol=0, atol=1e-10)
    assert set(found.agreement) == {"position", "key_bias", "query_key", "query_bias"}
    for name, value in found.agreement.items():
        ranks = spearmanr(halves[0][name].flatten(), halves[1][name].flatten()).statistic
        assert value == pytest.approx(float(ranks), abs=1e-9)


@pytest.mark.usefixtures("many_batches")
def test_fixed_means_serve_a_corpus_they_were_taken_on() -> None:
    model, texts = models.hooked("gptj", F64), documents()
    means = am.mean_qk(model, iter(texts))
    found = am.variance_shares(model, iter(texts), centre=means)
    splits = []
    for number, text in enumerate(texts):
        others = am.mean_qk(model, iter([each for n, each in enumerate(texts) if n != number]))
        splits.append((am.decompose_scores(model, text[None], centre=others), 0))
    check(found, shares_by_hand(splits), 1e-10)
    assert means.digest[:8] in found.centre


def test_results_on_other_terms_are_not_subtracted() -> None:
    model, texts = models.hooked("llama"), documents()
    one, whole = (am.variance_shares(model, iter(texts), shard=shard) for shard in ((0, 2), (0, 1)))
    with pytest.raises(InputError):
        one - am.variance_shares(model, iter(texts), first_key=False)
    torch.testing.assert_close((whole - one).shares, whole.shares - one.shares, rtol=0, atol=1e-12, equal_nan=True)


def test_layers_left_out_are_nan_and_figures_are_of_terms() -> None:
    found = am.variance_shares(models.hooked("gemma2"), iter(documents()), layers=[1], first_key=False)
    assert bool(found.shares[:, 0].isnan().all())
    assert found.to_frame()[["layer", "head"]].to_numpy().tolist() == [[1, head] for head in range(6)]
    assert "mean over heads" in found.lead and found.plot("position").data
    for wrong in ("mask", "nothing"):
        refuses("`figure` must be one of position", found.plot, wrong)


def test_one_text_has_no_agreement() -> None:
    found = am.variance_shares(models.hooked("llama"), iter(documents([9])))
    assert all(math.isnan(value) for value in found.agreement.values())
    assert found["position"].interval()[0].isnan().all()


def test_several_texts_at_once_have_halves_too() -> None:
    model, ids = models.hooked("llama", F64), models.token_ids("llama", 6, 8)
    together, streamed = am.variance_shares(model, ids), am.variance_shares(model, iter([*ids]))
    for one, other in zip(together.half_shares, streamed.half_shares, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert together.agreement == pytest.approx(streamed.agreement)


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    bad: list[tuple[Any, str]] = [
        (lambda: am.variance_shares(model, ids, first_key=1), "`first_key` must be"),
        (lambda: am.variance_shares(model, ids, centre="own"), "`centre` must be None"),
        (lambda: am.variance_shares(model, ids, layers=[2]), "from 0 to 1"),
        (lambda: am.variance_shares(model, ids, centre="position"), "needs 50 other texts"),
        (
            lambda: am.variance_shares(model, iter([ids]), centre="position"),
            r"a corpus runs in batches; .*per_position=True",
        ),
        (lambda: am.variance_shares("llama", ids), "must come from am.load"),
    ]
    for call, said in bad:
        refuses(said, call)


def test_an_edit_of_the_scores_is_not_explained_away() -> None:
    model = models.hooked("llama")
    with model.hooks({("q", 1): lambda x: x * 1.01}), pytest.raises(ExactnessError, match="layer 1, head"):
        am.variance_shares(model, models.token_ids("llama"))
