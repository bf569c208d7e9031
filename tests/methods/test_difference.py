"""`a - b` of two results of one kind: the numbers of each subtracted, with intervals where the texts are paired."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import maps
import models
import naive
import numpy as np
import pytest
import torch
from comparing import message_of as refused
from kinds import MODEL, PAIRS, SUBTRACTED, on_pairs, result

import attnmech as am
from attnmech.errors import MissingPointError

SAME = ("intervention", "layer", "head", "position", "other_layer", "other_head", "texts", "verdict", "collapse")
"""Columns that are not numbers of a head."""


@pytest.mark.parametrize(
    ("kind", "first"),
    [*zip(SUBTRACTED, cycle(["hooked", "trained"]), strict=False), *((kind, "others") for kind in SUBTRACTED)],
)
def test_numbers_are_those_of_the_first_minus_those_of_the_second(kind: str, first: str, tmp_path: Path) -> None:
    one, other = result(kind, first), result(kind, "plain")
    found = one - other
    assert type(found) is type(one) and found.parts == (one, other) and found.paired is (first != "others")
    frame, mine, yours = found.to_frame(), one.to_frame(), other.to_frame()
    assert not frame.drop(columns=list({*SAME} & {*frame.columns})).equals(mine)
    for name in frame.columns:
        if name in SAME:
            if name not in ("texts", "verdict"):
                assert list(frame[name]) == list(yours[name]), name
        elif not name.endswith(("_low", "_high", "agreeing", "clear", "clear_size", "one_text")):
            wanted = mine[name] - yours[name]
            # In null attention, texts may lack numbers: a number that one result lacks is left out of both.
            if kind != "null" or name in ("sink_mass", "remove", "zero_value", "only_sink"):
                np.testing.assert_allclose(frame[name], wanted, rtol=1e-6, atol=1e-9, err_msg=name)
    ends = [name for name in frame.columns if name.endswith("_low")]
    assert ends
    for low in ends:
        high = low.replace("_low", "_high")
        if first == "others":
            assert frame[[low, high]].isna().all().all()
        elif kind != "null":
            assert (frame[low] <= frame[high])[mine[low].notna() & yours[low].notna()].all(), low
    assert "too few" not in found.lead or first != "others"
    if kind not in ("blocks", "null"):
        assert ("the two are on different texts, so a difference has no interval" in found.lead) is (first == "others")
    if first == "others":
        return
    nothing = (other - other).to_frame().select_dtypes("number").drop(columns=list(SAME), errors="ignore")
    assert (nothing.fillna(0.0) == 0).all().all()
    again = am.load_result(found.save(tmp_path / "difference.safetensors"))
    assert again.to_frame().equals(frame) and repr(again) == repr(found)
    assert again.provenance == found.provenance and again.paired
    for part, wanted in zip(again.parts, (mine, yours), strict=True):
        assert part.to_frame().equals(wanted)
    assert "Difference of two results" in repr(found)
    page = found.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>Difference: " in page or "<h1>Difference: " in page


def test_what_it_is_the_difference_of_is_told() -> None:
    hooked, trained, others = (result("ablation", run) - result("ablation", "plain") for run in
                               ("hooked", "trained", "others"))  # fmt: skip
    assert "(hooks resid_pre 1 − none)" in hooked.lead and "on 7 texts: " in hooked.lead
    assert hooked.provenance.edits == ("resid_pre 1 − none",)
    weights = [part.provenance.weights for part in trained.parts]
    assert f"(weights {weights[0][:8]}… − {weights[1][:8]}…)" in trained.lead
    assert trained.provenance.weights == f"{weights[0]} − {weights[1]}"
    assert "on 5 texts against 7 texts: " in others.lead and others.provenance.tokens == ()
    assert hooked.provenance.inputs == result("ablation", "plain").provenance.inputs


def test_the_interval_of_an_effect_is_that_of_the_paired_differences() -> None:
    one, other = result("ablation", "hooked"), result("ablation", "plain")
    differences = (one.after - one.before) - (other.after - other.before)
    low, high = (one - other).interval()
    for layer, head in itertools.product(range(3), range(5)):
        wanted = naive.t_interval(differences[layer, head].tolist())
        assert (float(low[layer, head]), float(high[layer, head])) == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", ["focus", "focus of a corpus"])
def test_the_interval_of_a_mean_is_that_of_the_paired_differences(kind: str) -> None:
    one, other = result(kind, "hooked"), result(kind, "plain")
    low, high = (one - other)["entropy"].interval()
    parts = [result("focus", run).by_row("entropy")[..., 1:].double() for run in ("hooked", "plain")]
    for layer, head in itertools.product(range(3), range(5)):
        sums = [rows[layer, head].nansum(dim=-1).tolist() for rows in parts]
        counts = [(~rows[layer, head].isnan()).sum(dim=-1).tolist() for rows in parts]
        wanted = naive.difference_interval(*zip(sums, counts, strict=True))
        assert (float(low[layer, head]), float(high[layer, head])) == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    apart = (each["entropy"].interval() for each in (one, other))
    (low_one, _), (_, high_other) = apart
    assert not torch.allclose(low, low_one - high_other)


def test_the_interval_of_what_is_recovered() -> None:
    one, other = result("patching heads", "hooked"), result("patching heads", "plain")
    low, high = (one - other)["recovered"].interval()
    gaps = [(each.clean - each.before).tolist() for each in (one, other)]
    for layer, head in itertools.product(range(3), range(5)):
        above = [each.per_text[layer, head].tolist() for each in (one, other)]
        wanted = naive.difference_interval(*zip(above, gaps, strict=True))
        assert (float(low[layer, head]), float(high[layer, head])) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_heads_measured_in_one_of_them_have_no_difference() -> None:
    model, ids = models.hooked(MODEL), models.token_ids(MODEL, batch=7)
    some = am.ablate_heads(model, ids, [(0, 0), (2, 3), (2, 4)])
    found = some - am.ablate_heads(model, ids, [(2, 3), (1, 1)])
    assert found.layers == (2,) and found.to_frame()[["layer", "head"]].to_numpy().tolist() == [[2, 3]]
    assert (~found.effect.isnan()).nonzero().tolist() == [[2, 3]]
    focus = am.attention_focus(model, ids, layers=[2, 0]) - am.attention_focus(model, ids, layers=[0, 1])
    assert focus.layers == (0,) and focus.entropy[[1, 2]].isnan().all()
    assert focus.entropy[0].tolist() == [0.0] * 5 and focus.by_row("entropy").shape == (1, 5, 7, 7)
    apart = am.ablate_heads(model, ids, [(0, 0)]), am.ablate_heads(model, ids, [(0, 1)])
    assert "heads in common" in refused(lambda: apart[0] - apart[1])
    apart_focus = (am.attention_focus(model, ids, layers=[layer]) for layer in (0, 2))
    assert "layers in common to be subtracted; got [0] and [2]" in refused(
        lambda: next(apart_focus) - next(apart_focus)
    )


def test_texts_that_only_one_of_them_has_are_left_out() -> None:
    one, other = result("ablation", "hooked"), result("ablation", "plain")
    stopped = one.after.clone()
    stopped[1, 2, 3:] = torch.nan
    found = replace(one, after=stopped) - other
    wanted = ((one.after - one.before) - (other.after - other.before))[1, 2, :3].mean()
    assert float(found.effect[1, 2]) == pytest.approx(float(wanted), rel=1e-9)
    assert not found.complete and found.texts[1, 2] == 3 and found.texts[0, 0] == 7


def test_verdicts_say_how_they_changed() -> None:
    now, before = result("null", "others"), result("null", "plain")
    found = now - before
    changed = 0
    for row, new, old in zip(found.verdict, now.verdict, before.verdict, strict=True):
        for name, after, earlier in zip(row, new, old, strict=True):
            assert name == (after if after == earlier else f"{earlier} → {after}")
            changed += after != earlier
    assert changed and f"{changed} of 15 heads have a different verdict" in found.lead
    torch.testing.assert_close(found.null_share, now.null_share - before.null_share)
    assert (before - before).verdict == before.verdict


def test_shards_of_one_corpus_are_paired_whatever_the_tokens() -> None:
    texts = ["the keys to the cabinet", "a dog", "the cabinet", "the dog and the keys", "there are keys"]
    with_bos = am.load(models.fresh("llama"), tokenizer=models.tokenizer(has_bos=True))
    results = [am.attention_focus(with_bos, iter(texts), bos=bos) for bos in (True, False)]
    found = results[0] - results[1]
    assert found.paired and "bos yes − no" in found.lead
    halves = [am.attention_focus(with_bos, iter(texts), shard=(k, 2)) for k in range(2)]
    merged = [halves[0].merged(halves[1]), halves[1].merged(halves[0])]
    assert (merged[0] - merged[1]).paired and not (halves[0] - merged[0]).paired
    whole = am.attention_focus(with_bos, iter(texts), bos=True)
    assert (whole - merged[0]).paired and not (whole - halves[0]).paired
    for ends in zip((whole - merged[0])["entropy"].interval(), (whole - results[1])["entropy"].interval(), strict=True):
        torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)
    assert "merge the results of each corpus, then subtract" in refused(lambda: found.merged(results[0]))
    state = {name: value for name, value in halves[1].state.items() if name != "first_text"}
    older = replace(halves[1], state=state)
    for shards in (halves[0], older), (older, halves[0]):
        assert "different versions of attnmech: not all of them have 'first_text'" in refused(
            lambda shards=shards: shards[0].merged(shards[1])
        )


@pytest.mark.parametrize("lost", [0, 1])
def test_groups_of_two_tokenizers_are_paired_only_if_they_hold_the_same_texts(lost: int) -> None:
    words = models.WORDS[3:8]
    texts = [" ".join(words[number // 5**place % 5] for place in range(3 + number % 4)) for number in range(400)]
    model = am.load(models.fresh("llama"), tokenizer=models.tokenizer(has_bos=True))
    one, other = (am.attention_focus(model, iter(texts), bos=bos) for bos in (True, False))
    options = {**other.provenance.options, **({"left out": [3]} if lost else {})}
    other = replace(other, provenance=replace(other.provenance, options=options))
    assert bool((one - other)["entropy"].interval()[0].isnan().all())
    assert bool((one - one)["entropy"].interval()[0].isfinite().all())
    why = "the two results put these texts into different groups, so a difference has no interval"
    assert (one - other).lead.endswith(f"; {why}.") and why in (one - other).to_frame().attrs["intervals"]


def test_rows_and_other_facts_of_a_difference() -> None:
    one, other = result("focus", "hooked"), result("focus", "plain")
    found = one - other
    torch.testing.assert_close(found.by_row("entropy"), one.by_row("entropy") - other.by_row("entropy"), equal_nan=True)
    first = found.where(first_row=True)
    torch.testing.assert_close(
        first["self_mass"].mean, one.where(first_row=True).self_mass - other.where(first_row=True).self_mass
    )
    for ask in (lambda: found.received, lambda: found.top_key, lambda: found.collapse, lambda: found.sink_share(0)):
        with pytest.raises(MissingPointError, match="use its two results, `parts`"):
            ask()
    with pytest.raises(MissingPointError, match="rows of different texts cannot be subtracted"):
        (result("focus", "others") - other).by_row("entropy")
    np.testing.assert_array_equal(maps.shown(found.plot("self_focus")), found.self_top.numpy())
    updates = result("updates", "hooked") - result("updates", "plain")
    np.testing.assert_array_equal(maps.shown(updates.plot("target_magnitude")), updates.target_magnitude.numpy())
    assert "must be one of magnitude, orientation" in refused(lambda: updates.plot("magnitude_by_position"))
    torch.testing.assert_close(
        updates.blocks["cancellation"].mean,
        result("blocks", "hooked")["cancellation"].mean - result("blocks", "plain")["cancellation"].mean,
        equal_nan=True,
    )


def test_what_does_not_match_is_refused_with_what_differs() -> None:
    model, ids = models.hooked(MODEL), models.token_ids(MODEL, batch=7)
    plain, focus = result("ablation", "plain"), result("focus", "plain")
    shallow = am.load(models.randomised(models.gpt2(layers=2)))
    narrow = am.load(models.randomised(models.gpt2(heads=4)))
    heads, some = [(0, 0), (1, 1)], on_pairs(am.patch, positions=[1])
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: plain - am.ablate_heads(model, ids, heads, metric="kl"),
            "same metric; got 'loss' and 'kl'",
        ),
        (lambda: plain - am.ablate_heads(model, ids, heads, "resample"), "same method; got 'zero' and 'resample'"),
        (lambda: plain - am.ablate_heads(model, ids, heads, later="frozen"), "same later; got 'recompute' and"),
        (lambda: plain - am.ablate_heads(shallow, ids, heads), "same number of layers; got 3 and 2"),
        (lambda: plain - am.ablate_heads(narrow, ids, heads), "same number of heads; got 5 and 4"),
        (lambda: focus - am.attention_focus(shallow, ids), "same number of layers; got 3 and 2"),
        (lambda: focus - am.attention_focus(model, ids, last=3), "same last; got 8 and 3"),
        (lambda: focus - focus.where(first_row=True), "same rows; got"),
        (lambda: result("patching heads", "plain") - some(model, ids), "same positions; got None"),
        (lambda: result("importance", "plain") - am.head_importance(model, ids, method="zero"), "same method; got"),
        (lambda: result("null", "plain") - am.null_attention(model, ids, heads=heads, delta=0.1), "same delta; got"),
        (lambda: result("pairs", "plain") - am.ablate_pairs(model, ids, PAIRS[:1]), "same pairs; got"),
        (lambda: plain - focus, "only another HeadEffects can be subtracted from a HeadEffects; got AttentionFocus"),
        (lambda: plain - 1.0, "got float"),
        (lambda: (plain - plain) - plain, "a difference cannot be subtracted again"),
        (lambda: plain - (plain - plain), "a difference cannot be subtracted again"),
    ]  # fmt: skip
    for subtract, said in cases:
        assert said in refused(subtract)


def test_kinds_without_a_difference_say_what_has_one() -> None:
    model, ids = models.hooked(MODEL), models.token_ids(MODEL)
    made: dict[str, Any] = {
        "subtract a term": am.decompose_scores(model, ids),
        "subtract the matrices of a head": am.decompose_by_source(model, ids, layers=[1]),
        "subtract the results of am.ablate_heads": am.prune_heads(model, ids, layers=[0], steps=1, random=0),
        "subtract the results in them": am.report(model, ids[:1]),
    }
    for said, each in made.items():
        assert said in refused(lambda each=each: each - each)


def test_texts_left_out_of_one_result_are_left_out_of_the_pairs() -> None:
    """As if workers had left out a text on which they ended."""
    one, other = (models.hooked("gpt2"), am.load(models.fresh("gpt2", seed=4)))
    texts = models.token_ids("gpt2", batch=8, length=6)
    parts = []
    for model, left_out in ((one, 2), (other, 5)):
        result, alone = (am.attention_focus(model, iter(given)) for given in (texts, texts[left_out][None]))
        keep = (result.state["groups"] != alone.state["groups"]).nonzero()[:, 0].tolist()
        by_group = {name: result.state[name][..., keep] for name in ("sums", "counts", "groups", "first_text")}
        origin = replace(result.provenance, options={**result.provenance.options, "left out": [left_out]})
        state = {**result.state, **by_group}
        parts.append(replace(result, state=state, documents=result.documents - 1, provenance=origin))
    found = parts[0] - parts[1]
    assert found.paired
    both = texts[[0, 1, 3, 4, 6, 7]]
    wanted = am.attention_focus(one, iter(both)) - am.attention_focus(other, iter(both))
    for statistic in ("entropy", "concentration"):
        assert torch.allclose(found[statistic].mean, wanted[statistic].mean, rtol=1e-9)
        assert all(map(torch.allclose, found[statistic].interval(), wanted[statistic].interval()))
