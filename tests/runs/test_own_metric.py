"""A user's metric must not read the logits at padding, whose amount depends on the batch."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
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
    with pytest.raises(InputError, match=r"end_of_the_batch reads padding: .* batch\.lengths - 1"):
        CALLS[call](model, TEXTS, metric=end_of_the_batch)
    CALLS[call](model, TEXTS[:1], metric=end_of_the_batch)  # no padding, so nothing to read
