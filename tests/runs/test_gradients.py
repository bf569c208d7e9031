"""Gradients in torch's inference mode are those outside it; where torch cannot differentiate, the reason is named."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError


def logit(logits: Tensor, batch: Any) -> Tensor:
    return logits[:, -1, 2]


def attributed(model: am.HookedModel, ids: Tensor, **options: Any) -> Tensor:
    return am.attribute(model, ids, ids.flip(0), metric=logit, **options).per_pair


CALLS: dict[str, Callable[[am.HookedModel, Tensor], Tensor]] = {
    "run": lambda model, ids: model.run(ids, ["z"], gradients_of=logit).gradients["z", 1],  # type: ignore[index]
    "head_importance": lambda model, ids: am.head_importance(model, ids).per_text,
    "attribute": attributed,
    "integrated": lambda model, ids: attributed(model, ids, method="integrated", steps=2),
    "relp": lambda model, ids: attributed(model, ids, method="relp"),
    "edges": lambda model, ids: attributed(model, ids, edges=True),
    "attention_flow": lambda model, ids: torch.tensor(
        am.attention_flow(model, ids[:1], "gradient", metric=logit).to_frame().iloc[:, -1].to_numpy()
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_gradients_are_the_same_in_every_mode(call: str, mode: Callable[[], Any]) -> None:
    model, values = models.hooked("llama"), []
    for within in (nullcontext, mode):
        with within():
            ids = torch.tensor([[3, 4, 5, 6, 7], [8, 4, 9, 6, 10]])  # in inference mode, a tensor without gradients
            values.append(CALLS[call](model, ids))
            assert torch.is_inference_mode_enabled() == (within is torch.inference_mode)
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


def test_parameters_made_in_inference_mode_are_named() -> None:
    with torch.inference_mode():
        plain = models.randomised(models.llama())
    model = am.load(plain)
    assert bool(model.run(torch.tensor([[3, 4]])).logits.isfinite().all())
    with pytest.raises(InputError, match=r"tensors made within torch\.inference_mode\(\): the model's parameters, or"):
        am.head_importance(model, torch.tensor([[3, 4, 5]]))
