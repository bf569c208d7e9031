"""Retrieval from long texts: against loops over patterns, with a head planted in the demo model, and by chance."""

from collections.abc import Callable
from functools import cache
from typing import Final

import models
import planted
import pytest
import tiny
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.runs.haystacks import CUE, NEEDLE, REQUESTED, Haystacks
from attnmech.runs.retrieval import Retrieval

CONTEXT: Final = 70


@cache
def types_of_demo() -> am.results.HeadTypes:
    return am.head_types(models.demo(), context=CONTEXT)


def test_the_texts_have_a_needle_whose_beginning_is_repeated() -> None:
    haystacks = Haystacks.of(models.demo(), CONTEXT, seed=0)
    assert len(list(haystacks)) == 24 and len({ids.shape for ids in haystacks}) == 1
    assert haystacks.depths[0] == 0 and len(set(haystacks.depths)) == 24
    for ids, needle, keys in zip(haystacks, haystacks.needles.tolist(), haystacks.keys.tolist(), strict=True):
        text = ids[0].tolist()
        assert len(text) == CONTEXT and text[-NEEDLE:] == needle and len(set(needle)) == NEEDLE
        assert [text[key] for key in keys] == needle[CUE:] == [text[row + 1] for row in haystacks.rows]
        assert all(text.count(token) == 2 for token in needle)
    assert not torch.equal(haystacks.needles, Haystacks.of(models.demo(), CONTEXT, seed=1).needles)


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
def test_shares_are_those_of_loops_over_patterns() -> None:
    model, types = models.demo(), types_of_demo()
    haystacks = Haystacks.of(model, CONTEXT, seed=0)
    keys, retrieved, by_position = haystacks.keys.tolist(), torch.zeros(4, 8), torch.zeros(4, 8)
    for number, ids in enumerate(haystacks):
        acts = model.run(ids, points=["pattern", "logits"])
        produced = acts["logits"][0].argmax(dim=-1).tolist()
        for layer in range(4):
            argmax = acts["pattern", layer][0].argmax(dim=-1).tolist()
            for head in range(8):
                for place, row in enumerate(haystacks.rows):
                    highest = argmax[head][row]
                    if produced[row] == ids[0, row + 1]:
                        retrieved[layer, head] += highest == keys[number][place]
                        others = [key[place] for other, key in enumerate(keys) if other != number]
                        by_position[layer, head] += others.count(highest) / 23
    torch.testing.assert_close(types.scores["retrieval"].float(), retrieved / (24 * REQUESTED))
    for claim in types.to_frame().query("type == 'retrieval'").itertuples():
        expected = float(by_position[claim.layer, claim.head]) / (24 * REQUESTED)
        assert claim.baseline == pytest.approx(expected) and claim.rows == 24 * REQUESTED


def test_induction_heads_of_the_demo_model_retrieve_and_no_others() -> None:
    types = types_of_demo()
    claims = types.to_frame().query("type == 'retrieval'")
    assert {*zip(claims.layer, claims["head"], strict=True)} == {(2, head) for head in (4, 5, 6, 7)}
    assert types.types_of(2, 6) == ("induction", "retrieval") and types.main_types[2, 6] == "induction"
    assert "4 retrieve needles from long texts" in types.lead
    assert "retrieval" in types.by_head() and "retrieval" not in am.head_types(models.demo()).by_head()


def planting(shift: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Head 1 attends from each repeated token to its first copy, `shift` later."""

    def edited(pattern: Tensor, ids: Tensor) -> Tensor:
        for text, tokens in enumerate(ids.tolist()):
            for row in range(1, len(tokens)):
                if tokens[row] in tokens[1:row]:
                    pattern[text, 1, row] = 0.0
                    pattern[text, 1, row, tokens.index(tokens[row], 1) + shift] = 1.0
        return pattern

    return edited


def test_a_planted_head_is_named_and_one_that_attends_to_the_token_before_is_not() -> None:
    with planted.with_tokens(models.demo(), 1, planting(1)):
        assert set(am.head_types(models.demo(), context=CONTEXT).types_of(1, 1)) == {"induction", "retrieval"}
    with planted.with_tokens(models.demo(), 1, planting(0)):
        assert am.head_types(models.demo(), context=CONTEXT).types_of(1, 1) == ("duplicate",)


def test_attention_without_the_answer_is_no_retrieval() -> None:
    model = am.load(tiny.model_of("gpt2"))
    with planted.with_tokens(model, 1, planting(1)):
        assert am.head_types(model, context=CONTEXT).types_of(1, 1) == ("induction",)


def test_heads_that_attend_by_position_are_claimed_at_no_more_than_the_nominal_rate() -> None:
    """Heads prefer some positions, whatever the text; the model produces every token. 200 models of 32 heads."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.arange(24)[:, None] + torch.arange(REQUESTED)
    false_claims = 0
    for _ in range(200):
        liked = torch.rand(32, 40, generator=generator) ** 8
        highest = liked.multinomial(24 * REQUESTED, replacement=True, generator=generator).view(4, 8, 24, REQUESTED)
        found = Retrieval.of(CONTEXT, torch.ones(24, REQUESTED, dtype=torch.float64), highest, keys)
        false_claims += len(found.claims(range(4))) > 0
    assert false_claims <= 10


def test_bad_context() -> None:
    for context, message in (
        (-1, "`context` must be a whole number, 0 or more; got -1"),
        (20, r"`context` must be 4\d tokens or more, and no more than the model reads"),
    ):
        refuses(message, am.head_types, models.hooked("llama"), context=context)
    with pytest.raises(InputError, match=r"no more than the model reads \(128\); got 10000\."):
        am.head_types(am.load(tiny.model_of("gpt2")), context=10_000)
    refuses("`context` needs a decoder alone", am.head_types, am.load(tiny.model_of("bert")), context=CONTEXT)
