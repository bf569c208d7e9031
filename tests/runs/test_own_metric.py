"""A user's metric must not read the logits at padding or of other texts, which depend on the batch."""

from collections.abc import Callable
from typing import Any

import models
import pandas as pd
import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

SHORT = torch.tensor([3, 4, 5])
TEXTS = [SHORT, torch.tensor([6, 7, 8, 9, 10, 11, 12]), torch.tensor([5, 13, 14, 15, 16])]


def last(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
    return logits[range(len(logits)), batch.lengths - 1].log_softmax(-1)[:, 2]


def mean(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
    return (logits.log_softmax(-1)[..., 2] * batch.mask).sum(1) / batch.lengths


def end_of_the_batch(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
    return logits[:, -1].log_softmax(-1)[:, 2]


ORDERED = torch.tensor([2, 3, 2])
"""A token for each text, which a metric may hold itself if the texts share a batch."""

MIXING: dict[str, Callable[..., Tensor]] = {
    "minus the mean": lambda logits, batch: (m := last(logits, batch)) - m.mean(),
    "minus a thousandth of the mean": lambda logits, batch: (m := last(logits, batch)) - 1e-3 * m.mean(),
    "minus a little in float32": lambda logits, batch: (m := last(logits.float(), batch)) - 1e-4 * m.mean(),
    "minus a little in float64": lambda logits, batch: (m := last(logits, batch)) - 1e-8 * m.mean(),
    "minus a little in bfloat16": lambda logits, batch: (m := last(logits.bfloat16(), batch)) - 0.1 * m.mean(),
    "squares": lambda logits, batch: (m := logits[:, 0, 3] ** 2) - 1e-3 * m.mean(),
    "minus the first": lambda logits, batch: (m := last(logits, batch)) - m[0],
    "minus the last": lambda logits, batch: (m := last(logits, batch)) - m[-1],
    "its neighbour's": lambda logits, batch: last(logits, batch).roll(1),
    "standardised": lambda logits, batch: (m := last(logits, batch)) / m.std(correction=0),
    "ranked": lambda logits, batch: last(logits, batch).argsort().argsort() + 0.0 * last(logits, batch),
    "sorted": lambda logits, batch: last(logits, batch).sort().values,
    "the same for all": lambda logits, batch: last(logits, batch).mean().expand(len(logits)),
    "by order": lambda logits, batch: logits[range(len(logits)), batch.lengths - 1, ORDERED[: len(logits)]],
    "by order, minus the mean": lambda logits, batch: (
        (m := logits[range(len(logits)), batch.lengths - 1].gather(1, ORDERED[: len(batch.ids)].view(3, 1))[:, 0])
        - m.mean()
    ),
}  # fmt: skip

FAIR: dict[str, Callable[..., Tensor]] = {
    "float32": lambda logits, batch: last(logits.float(), batch),
    "bfloat16": lambda logits, batch: last(logits.bfloat16(), batch),
    "a common shift in float32": lambda logits, batch: last(logits.float() - logits.float().max(), batch),
    "a difference of large numbers": lambda logits, batch: (
        1e6 + (x := logits.float())[range(len(x)), batch.lengths - 1, 2] - 1e6
    ),
    "whole numbers": lambda logits, batch: logits[range(len(logits)), batch.lengths - 1].argmax(-1),
    "a product": lambda logits, batch: logits[:, 0].float() @ torch.linspace(-1, 1, logits.shape[-1]),
    "entropy": lambda logits, batch: -(last(logits.float(), batch).exp() * last(logits.float(), batch)),
}  # fmt: skip
"""Metrics that do not mix texts, whatever their rounding."""

CALLS: dict[str, Callable[..., Any]] = {
    "ablate_heads": lambda model, texts, **options: am.ablate_heads(model, texts, **options).before,
    "head_importance": lambda model, texts, **options: am.head_importance(model, texts, **options).before,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("metric", [last, mean])
def test_a_text_has_its_number_whatever_it_is_batched_with(call: str, metric: Callable[..., Tensor]) -> None:
    model = models.hooked("gpt2")
    together = CALLS[call](model, TEXTS, metric=metric)
    alone = [CALLS[call](model, [text], metric=metric)[0] for text in TEXTS]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_a_metric_that_reads_padding_is_refused(call: str) -> None:
    model = models.hooked("gpt2")
    with pytest.raises(InputError, match=r"end_of_the_batch reads padding: .* logits\[batch\.at\(\[-1\]\)\]"):
        CALLS[call](model, TEXTS, metric=end_of_the_batch)
    CALLS[call](model, TEXTS[:1], metric=end_of_the_batch)  # no padding, so nothing to read


EVERY: dict[str, Callable[..., Any]] = {
    "ablate_heads": am.ablate_heads,
    "ablate_pairs": lambda model, texts, **options: am.ablate_pairs(model, texts, [((0, 1), (1, 2))], **options),
    "ablate_set": lambda model, texts, **options: am.ablate_set(model, texts, [(0, 1)], **options),
    "sweep": lambda model, texts, **options: am.sweep(
        model, texts, {"zero": am.Intervention.zero([(0, 1)])}, **options
    ),
    "prune_heads": lambda model, texts, **options: am.prune_heads(model, texts, higher_is_better=True, **options),
    "head_importance": am.head_importance,
    "null_attention": lambda model, texts, **options: am.null_attention(model, texts, delta=0.1, **options),
    "steer": lambda model, texts, **options: am.steer(
        model, {1: torch.ones(1, 1, model.d_model)}, texts, at="resid_post", **options
    ),
    "patch": lambda model, texts, **options: am.patch(model, texts, [text + 1 for text in texts], **options),
    "path_patch": lambda model, texts, **options: am.path_patch(model, texts, [text + 1 for text in texts], **options),
    "attribute": lambda model, texts, **options: am.attribute(model, texts, [text + 1 for text in texts], **options),
    "edges": lambda model, texts, **options: am.attribute(
        model, texts, [text + 1 for text in texts], edges=True, **options
    ),
    "faithfulness": lambda model, texts, **options: am.faithfulness(
        model, am.Circuit(nodes=("L0H1",)), texts, [text + 1 for text in texts], **options
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", EVERY)
def test_every_call_refuses_a_metric_that_mixes_texts(call: str) -> None:
    with pytest.raises(
        InputError, match=r"^the metric mixes texts: its number for a text changes with the other texts"
    ):
        EVERY[call](models.hooked("gpt2"), TEXTS, metric=MIXING["minus the mean"])


@pytest.mark.parametrize("kind", MIXING)
def test_every_kind_of_mixing_is_refused(kind: str) -> None:
    for texts in (TEXTS, [TEXTS[1], *TEXTS], [TEXTS[0], TEXTS[2], TEXTS[1]]):
        if len(texts) == 3 or "by order" not in kind:
            refuses("mixes texts", am.ablate_heads, models.hooked("gpt2"), texts, [(0, 1)], metric=MIXING[kind])


@pytest.mark.parametrize("kind", FAIR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_mixing(kind: str, dtype: torch.dtype) -> None:
    model = am.load(models.fresh("gpt2").to(dtype))
    for texts in (TEXTS, TEXTS[:1], [TEXTS[1], *TEXTS]):
        am.ablate_heads(model, texts, [(0, 1)], metric=FAIR[kind])


@pytest.mark.parametrize("kind", ["minus the mean", "sorted", "the same for all"])
def test_copies_do_not_hide_what_mixes_texts(kind: str) -> None:
    for texts in ([*TEXTS[:2], TEXTS[0]], [TEXTS[0], TEXTS[0]]):
        refuses("mixes texts", am.ablate_heads, models.hooked("gpt2"), texts, [(0, 1)], metric=MIXING[kind])


@pytest.mark.parametrize("call", ["ablate_set", "patch", "attribute", "steer"])
def test_a_metric_may_change_the_logits_in_place(call: str) -> None:
    model, place = models.hooked("gpt2"), lambda logits, batch: (range(len(logits)), batch.lengths - 1, 2)
    frames = [
        EVERY[call](model, TEXTS, metric=metric).to_frame()
        for metric in (
            lambda logits, batch: logits.div_(3.0).add_(1.0)[place(logits, batch)],
            lambda logits, batch: (logits / 3.0 + 1.0)[place(logits, batch)],
        )
    ]
    pd.testing.assert_frame_equal(*frames)


def test_a_step_in_place_that_a_gradient_needs_is_named() -> None:
    with pytest.raises(InputError, match=r"changes in place a tensor that its own gradient needs; use .* x\.mul_\(2\)"):
        am.head_importance(models.hooked("gpt2"), TEXTS, metric=lambda logits, batch: last(logits, batch).exp().mul_(2))


def test_one_text_and_texts_in_batches_of_one_are_tried_beside_their_opposite() -> None:
    model = models.hooked("gpt2")
    for texts, options in ((TEXTS[:1], {}), (TEXTS, {"memory": 1e-3})):
        refuses("mixes texts", am.head_importance, model, texts, metric=MIXING["minus the mean"], **options)
    am.ablate_heads(model, TEXTS[:1], [(0, 1)], metric=lambda logits, batch: logits[0, -1, 5][None])


def test_a_metric_that_holds_a_token_for_each_text_stays_possible_in_one_batch() -> None:
    """On fewer texts it fails, so it is tried on all of them."""
    model, texts = models.hooked("gpt2"), torch.stack([SHORT, SHORT + 1, SHORT + 2])
    own = am.ablate_heads(model, texts, [(0, 1)], metric=lambda logits, batch: logits[torch.arange(3), -1, ORDERED])
    by_answers = am.ablate_heads(
        model, texts, [(0, 1)], metric=lambda logits, batch: logits[:, -1].gather(1, batch.answers[:, None])[:, 0],
        answers=ORDERED,
    )  # fmt: skip
    assert torch.equal(own.before, by_answers.before) and torch.equal(own.per_text[0, 1], by_answers.per_text[0, 1])
