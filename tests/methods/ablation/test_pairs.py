"""Pairs of heads, ablated together and alone, equal ablations by hand on the raw transformers model."""

from typing import Any

import models
import pytest
import torch
from by_hand import divergences, losses, z_changed, zeroed
from torch import Tensor

import attnmech as am
from attnmech.draw.text import signed
from attnmech.errors import InputError

PAIRS = [((0, 1), (1, 2)), ((1, 0), (1, 2)), ((1, 2), (0, 0))]


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "bloom"])
def test_zeroing_pairs_equals_the_raw_model(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    metric = "loss" if hooked.causal else "kl"
    found = am.ablate_pairs(hooked, ids, PAIRS, metric=metric)
    with torch.no_grad():
        clean = plain(ids).logits

        def judged() -> Tensor:
            logits = plain(ids).logits
            return losses(logits, ids, [7] * 3) if metric == "loss" else divergences(logits, clean, [7] * 3)

        before = judged()
        for number, ((layer, head), (other_layer, other)) in enumerate(PAIRS):
            with z_changed(plain, layer, zeroed(head)):
                one = judged()
                with z_changed(plain, other_layer, zeroed(other)):
                    both = judged()
            with z_changed(plain, other_layer, zeroed(other)):
                second = judged()
            for name, after in (("both", both), ("one", one), ("other", second)):
                torch.testing.assert_close(found[name].per_text[number], after - before, rtol=1e-3, atol=2e-5)
            interaction = (both - before) - (one - before) - (second - before)
            torch.testing.assert_close(found["interaction"].per_text[number], interaction, rtol=1e-3, atol=4e-5)
            assert float(found.interaction[number]) == pytest.approx(float(interaction.mean()), rel=1e-3, abs=4e-5)
    assert float(found.interaction.abs().max()) > 1e-3


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_singles_are_those_of_the_sweep(method: Any) -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    options: dict[str, Any] = {"reference": ids.flip(0).roll(1, dims=1)} if method == "mean" else {"seed": 4}
    found = am.ablate_pairs(hooked, ids, [((0, 5), (1, 3))], method, **options)
    singles = am.ablate_heads(hooked, ids, [(0, 5), (1, 3)], method, **options)
    torch.testing.assert_close(found.after_one[0], singles.after[0, 5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.after_other[0], singles.after[1, 3], rtol=1e-5, atol=1e-6)
    swapped = am.ablate_pairs(hooked, ids, [((1, 3), (0, 5))], method, **options)
    torch.testing.assert_close(swapped.after_both, found.after_both, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(swapped.one, found.other, rtol=1e-5, atol=1e-6)


def test_all_pairs_of_a_list_are_those_named() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    heads = [(1, 2), (0, 1), (2, 4)]
    found = am.ablate_pairs(hooked, ids, "all", heads=heads)
    named = [((0, 1), (1, 2)), ((0, 1), (2, 4)), ((1, 2), (2, 4))]
    assert found.pairs == tuple(named)
    torch.testing.assert_close(found.after_both, am.ablate_pairs(hooked, ids, named).after_both)
    assert len(am.ablate_pairs(models.hooked("bloom"), models.token_ids("bloom"), "all", heads="all").pairs) == 15


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pairs": "all"}, "pairs=\"all\" with `heads`, .*; got pairs='all' without `heads`"),
        ({"pairs": "some", "heads": [(0, 1), (0, 2)]}, "got pairs='some'"),
        ({"pairs": PAIRS, "heads": "all"}, '`heads` is for pairs="all"'),
        ({"pairs": "all", "heads": [(0, 1)]}, "pairs need two heads or more; `heads` names only L0H1"),
        ({"pairs": "all", "heads": [(0, 1), (0, 9)]}, "`head` must be from 0 to 4"),
    ],
)
def test_bad_lists_of_heads(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        am.ablate_pairs(models.hooked("gpt2"), models.token_ids("gpt2"), **given)


def test_a_head_of_several_pairs_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.runs import engine

    measured: list[int] = []
    real = engine.Texts.after

    def counting(self: Any, changes: Any, judge: Any) -> Any:
        measured.append(len(changes))
        return real(self, changes, judge)

    monkeypatch.setattr(engine.Texts, "after", counting)
    am.ablate_pairs(models.hooked("gpt2"), models.token_ids("gpt2"), PAIRS)
    assert sum(measured) == 4 + 3


def test_what_it_says_and_draws() -> None:
    ids = torch.randint(3, 50, (30, 9), generator=torch.Generator().manual_seed(0))
    found = am.ablate_pairs(models.hooked("gpt2"), ids, PAIRS)
    top = int(found.interaction.abs().argmax())
    names = " + ".join(f"L{layer}H{head}" for layer, head in PAIRS[top])
    clear = f"{int(found.clear.sum())} of 3 pairs have a clear interaction; the largest is that of {names}, "
    assert f"Zero ablation of 3 pairs of heads on 30 texts: {clear}" in repr(found) and found.clear[top]
    ends = " to ".join(signed(float(end[top]), ".3g") for end in found.simultaneous())
    assert f"{int(found.agreeing[top])} of 30 texts (95 % interval, corrected for 3 pairs: {ends})" in repr(found)
    both, alone, interaction = found.plot().data
    assert list(both.x) == found.both.tolist() and list(interaction.x) == found.interaction.tolist()
    torch.testing.assert_close(torch.tensor(list(alone.x)), found.one + found.other)
    torch.testing.assert_close(torch.tensor(list(interaction.error_x.array)), found.interval()[1] - found.interaction)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "at least one pair"),
        ([(0, 1)], "must be a list of pairs of heads"),
        ([((0, 1), (1, 2), (0, 0))], "must be a list of pairs of heads"),
        ([((0, 1), (0, 1))], "a pair needs two heads; got L0H1 twice"),
        ([((0, 5), (1, 1))], "`head` must be from 0 to 4"),
    ],
)
def test_bad_pairs(pairs: Any, said: str, unchecked: None) -> None:
    with pytest.raises(InputError, match=said):
        am.ablate_pairs(models.hooked("gpt2"), models.token_ids("gpt2"), pairs)
