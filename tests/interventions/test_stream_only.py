"""Heads that see the first and the last keys alone, against plain transformers with a mask made by hand."""

import models
import pytest
import torch
from comparing import refuses
from streaming import FIRST, LAST, by_hand, kept
from torch import Tensor

import attnmech as am


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom"])
def test_all_heads_are_as_in_transformers_with_a_mask(name: str) -> None:
    model, ids = models.hooked(name), models.token_ids(name)
    assert ids.shape[1] > FIRST + LAST
    with model.intervene(am.Intervention.stream_only("all", first=FIRST, last=LAST)):
        changed = model.run(ids).logits
    torch.testing.assert_close(changed, by_hand(name, ids), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(changed, model.run(ids).logits, atol=1e-3)


def test_one_head_is_as_with_scores_hidden_by_a_hook_also_with_padding_and_a_cache() -> None:
    model, inputs = models.hooked("llama"), models.padded("llama")
    change = am.Intervention.stream_only([(1, 2)], first=FIRST, last=LAST)

    def hide(scores: Tensor) -> None:
        scores[:, 2] = scores[:, 2].masked_fill(~kept(scores.shape[-1])[-scores.shape[-2] :], -torch.inf)

    with model.intervene(change):
        acts, written = (
            model.run(inputs, points=["pattern", "logits"]),
            model.generate(inputs, 6, stop_at_eos=False, points=["logits"]),
        )
        whole = [model.run(written).logits[row, length + 4] for row, length in enumerate((7, 5, 3))]
    with model.hooks({("scores", 1): hide}):
        expected = model.run(inputs)
    for row, length in enumerate((7, 5, 3)):
        torch.testing.assert_close(acts.logits[row, :length], expected.logits[row, :length], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(written.steps[-1].logits[row, -1], whole[row], rtol=1e-4, atol=2e-5)
    assert torch.equal(model.run(inputs, points=["pattern"])["pattern", 1][:, :2], acts["pattern", 1][:, :2])


def test_bad_numbers_and_cross_attention_are_refused() -> None:
    for numbers, message in (
        ({"first": -1}, "`first` must be a whole number"),
        ({"last": 0}, "`last` must be a whole"),
    ):
        refuses(message, am.Intervention.stream_only, "all", **numbers)
    model = models.hooked("t5")
    change = am.Intervention.stream_only([(0, 1)], stack="cross")
    refuses("so no row has last keys", lambda: model.intervene(change).__enter__())
    assert am.Intervention.stream_only([(3, 5)]) == am.Intervention.stream_only([(3, 5)], first=4, last=256)
