"""Copies of a text, a pair or a question are no further evidence: tripled inputs give the intervals of the inputs."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import models
import numpy as np
import pandas as pd
import pytest
import torch

import attnmech as am
from attnmech.maths.intervals import TextMeans

LENGTHS = (5, 6, 7, 8, 9, 6)
IDS, OTHERS = (
    [models.token_ids("gpt2", batch=1, length=length, seed=seed + place)[0] for place, length in enumerate(LENGTHS)]
    for seed in (1, 70)
)
TEXT = "the keys to the cabinet"

Texts = Sequence[torch.Tensor]


def hooked(seed: int = 0) -> am.HookedModel:
    return am.load(models.fresh("gpt2", seed=seed), tokenizer=models.tokenizer())


@pytest.fixture(scope="module")
def model() -> am.HookedModel:
    return hooked()


def as_answers(texts: Texts) -> dict[str, list[int]]:
    return {"answers": [int(text[0]) for text in texts], "against": [int(text[1]) for text in texts]}


def pairs_of(texts: Texts) -> tuple[Texts, Texts]:
    other = {tuple(ids.tolist()): corrupted for ids, corrupted in zip(IDS, OTHERS, strict=True)}
    return list(texts), [other[tuple(text.tolist())] for text in texts]


def patched(call: Callable[..., Any], **options: Any) -> Callable[[am.HookedModel, Texts], Any]:
    return lambda model, texts: call(model, *pairs_of(texts), **as_answers(texts), **options)


CALLS: dict[str, Callable[[am.HookedModel, Texts], Any]] = {
    "focus": lambda model, texts: am.attention_focus(model, texts),
    "focus of a corpus": lambda model, texts: am.attention_focus(model, iter(texts)),
    "updates": lambda model, texts: am.residual_updates(model, texts),
    "ablation": lambda model, texts: am.ablate_heads(model, texts, layers=[0, 1]),
    "importance": lambda model, texts: am.head_importance(model, texts),
    "sweep": lambda model, texts: am.sweep(model, texts, {"none": [am.Intervention.zero([(0, 1), (1, 2)])]}),
    "pairs": lambda model, texts: am.ablate_pairs(model, texts, [((0, 0), (1, 2))]),
    "pruning": lambda model, texts: am.prune_heads(model, texts, layers=[1], steps=2, random=1),
    "patching": patched(am.patch, layers=[1]),
    "paths": patched(am.path_patch, receivers="logits"),
    "attribution": patched(am.attribute, confirm=3, controls=1),
    "steering": lambda model, texts: am.steer(
        model, {1: torch.ones(1, 1, model.d_model)}, texts, at="resid_post", factors=[1.0], side_inputs=texts
    ),
    "null attention": lambda model, texts: am.null_attention(model, texts, layers=[1]),
    "segments": lambda model, texts: am.segment_attention(model, iter(texts), segments="line"),
    "drift": lambda model, texts: am.residual_drift(model, texts, k=10),
    "types": lambda model, texts: am.head_types(model, texts),
    "redundancy": lambda model, texts: am.redundancy(model, iter(texts)),
    "odd heads": lambda model, texts: am.odd_heads(model, texts),
    "variance": lambda model, texts: am.variance_shares(model, texts),
    "directions": lambda model, texts: am.qk_directions(model, texts, k=2),
    "difference": lambda model, texts: am.attention_focus(model, texts) - am.attention_focus(hooked(4), texts),
    "comparison": lambda model, texts: am.compare(model, hooked(4), texts, am.ablate_heads),
}  # fmt: skip


def tables_of(result: Any) -> list[pd.DataFrame]:
    tables = [result.to_frame()]
    confirmation = getattr(result, "confirmation", None)
    return tables if confirmation is None else [*tables, confirmation.to_frame()]


def require_same(one: Any, other: Any) -> None:
    """Everything that depends on evidence is the same: means, intervals, tests."""
    for first, second in zip(tables_of(one), tables_of(other), strict=True):
        assert list(first.columns) == list(second.columns) and len(first) == len(second)
        for name in set(first.columns) - {"texts", "rows_without_keys", "anisotropy_across"}:
            mine, yours = first[name].to_numpy(), second[name].to_numpy()
            if mine.dtype.kind in "fi":
                np.testing.assert_allclose(mine, yours, rtol=2e-4, atol=2e-5, err_msg=name)
            else:
                assert mine.tolist() == yours.tolist(), name


def test_examples_are_of_distinct_texts(model: am.HookedModel) -> None:
    columns = ["layer", "head", "rank", "value", "window", "position"]
    once, thrice = (am.examples(model, iter(texts), k=4) for texts in (IDS, [*IDS, *IDS[1:], *IDS[1:]]))
    pd.testing.assert_frame_equal(once.to_frame()[columns], thrice.to_frame()[columns])
    shards = [am.examples(model, iter([*IDS, *IDS[1:], *IDS[1:]]), k=4, shard=(k, 2)) for k in range(2)]
    assert "(16 texts, 6 distinct): in" in thrice.lead and shards[0].merged(shards[1]).lead == thrice.lead
    halves = thrice.halves()
    assert int((halves["even_rows"] + halves["odd_rows"]).max()) <= len(IDS)


@pytest.mark.parametrize("name", CALLS)
def test_tripled_texts_are_no_further_evidence(name: str, model: am.HookedModel) -> None:
    once, thrice = (CALLS[name](model, texts) for texts in (IDS, [*IDS, *IDS[::-1], *IDS]))
    require_same(once, thrice)
    assert not re.search(r"\([^()]*\(", thrice.lead), thrice.lead
    if name == "directions":
        return
    note = str(thrice.to_frame().attrs.get("intervals", ""))
    assert "6 distinct)" in f"{thrice.lead} {thrice!r}" or "12 texts are copies" in note, thrice.lead


@pytest.mark.parametrize("call", [am.attention_focus, am.odd_heads, am.variance_shares, am.residual_updates])
def test_texts_with_the_same_tokens_are_one_text(call: Callable[..., Any], model: am.HookedModel) -> None:
    words = models.WORDS[3:]
    texts = [" ".join(words[(start + 2 * place) % 5] for place in range(4 + start)) for start in range(6)]
    spaced = [text.replace(" ", "  ") for text in texts]
    once, twice = call(model, iter(texts)), call(model, iter([*spaced, *texts]))
    require_same(once, twice)
    note = str(twice.to_frame().attrs.get("intervals", ""))
    assert "6 distinct)" in f"{twice.lead} {twice!r}" or "6 texts are copies" in note, twice.lead


def test_copies_among_many_texts_are_one_text(model: am.HookedModel) -> None:
    """Beyond 256 texts too, a text and its copy with other spaces are in one group: intervals do not shrink."""
    words = models.WORDS[3:8]
    texts = [" ".join(words[number // 5**place % 5] for place in range(3 + number % 4)) for number in range(400)]
    once, twice = (
        am.attention_focus(model, iter(some)) for some in (texts, [*texts, *(t.replace(" ", "  ") for t in texts)])
    )
    assert torch.equal(once.state["groups"], twice.state["groups"]) and len(once.state["groups"]) > 128
    require_same(once, twice)


def test_strings_and_padded_ids_are_the_texts_that_they_hold(model: am.HookedModel) -> None:
    words = model.encode([TEXT, TEXT])
    padded = {
        "input_ids": torch.tensor([[2, *words.ids[0].tolist()], [*words.ids[0].tolist(), 2]]),
        "attention_mask": torch.tensor([[0, *[1] * 5], [*[1] * 5, 0]]),
    }
    for texts in ([TEXT] * 7, iter([TEXT] * 7)):
        found = am.attention_focus(model, texts)
        assert found["entropy"].interval()[0].isnan().all()
        assert "1 text is too few" in found.to_frame().attrs["intervals"]
    assert am.attention_focus(model, padded)._n_distinct == 1
    assert am.ablate_heads(model, padded, layers=[0]).provenance.copies == (0, 0)


def test_one_pair_twelve_times_confirms_nothing(model: am.HookedModel) -> None:
    found = patched(am.attribute, confirm=3, controls=2)(model, [IDS[0]] * 12)
    assert "whether the 3 strongest hold is unknown; 1 pair is too few" in found.confirmation.lead
    assert not found.clear.any() and not found.clear_size.any() and bool(found.interval()[0].isnan().all())
    curve = am.faithfulness(model, circuit_of(model), *pairs_of([IDS[0]] * 12), **as_answers([IDS[0]] * 12))
    assert curve.lead.startswith("On 12 pairs (1 distinct)") and "nan" not in curve.lead


def circuit_of(model: am.HookedModel) -> am.Circuit:
    return patched(am.attribute, edges=True)(model, IDS[:2]).circuit(20)


def test_a_text_with_two_answers_is_two_texts(model: am.HookedModel) -> None:
    answers = {"answers": [3, 4, 3], "against": [5, 6, 5]}
    found = am.ablate_heads(model, [IDS[0]] * 3, layers=[0], metric="logit_difference", **answers)
    assert found.provenance.copies == (0, 1, 0) and "3 texts (2 distinct)" in found.lead


def test_a_pair_or_label_that_is_given_again_is_counted(model: am.HookedModel) -> None:
    words = models.WORDS[3:]
    pairs, labels = ([*itertools.pairwise(words[:7])], [(" ".join(words[:place]), 4, 2, "two") for place in (6, 7)])
    one, three = (
        am.function_heads(model, examples, shots=2, prompts=3) for examples in (pairs, iter([*pairs, *pairs[::-1]]))
    )
    require_same(one, three)
    assert "6 pairs are copies of others" in three.note and "copies" not in one.note
    assert am.relations(model, labels * 3).lead.startswith("6 labelled pairs (2 distinct) of 1 relation in 2 texts")


def test_means_of_copies_by_hand() -> None:
    """Copies weigh in the mean; the standard error is the jackknife over distinct texts."""
    values = torch.tensor([1.0, 4.0, -2.0, 0.5, 3.0, 7.0, 1.0, -2.5]).double()
    copies = (0, 1, 2, 3, 4, 5, 0, 2)
    means = TextMeans.of_values(values, copies)
    held = [[float(value) for value, number in zip(values, copies, strict=True) if number == text] for text in range(6)]
    left_out = [np.mean([*itertools.chain(*held[:text], *held[text + 1 :])]) for text in range(6)]
    deviations = [float(values.mean()) - mean for mean in left_out]
    error = np.sqrt(5 / 6 * np.sum(np.square(deviations)))
    assert float(means.mean) == pytest.approx(float(values.mean())) and int(means.texts) == 6
    assert float(means.standard_error) == pytest.approx(error)
    assert int(means.agreeing) == 5 and float(means.effective_texts) == pytest.approx(64 / 12)
