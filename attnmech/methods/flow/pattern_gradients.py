"""The gradient of a text's metric with respect to attention probabilities, from a forward and a backward pass."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ...batch import Batch
from ...model.run.hooked import HookedModel
from ...runs.corpus import CorpusBatch
from ...runs.gradients import differentiated
from ...runs.judged import JudgedTexts
from ...runs.metrics import Metric


def weighted_gradients(
    model: HookedModel, batch: Batch, judge: Metric, layers: Sequence[int]
) -> Float[Tensor, "layer head query key"]:
    """Computes p ⊙ ∂metric/∂p of one text, between its real tokens, without padding.

    The derivative varies each p_ij alone, so that rows no longer sum to 1, and everything computed from p_ij follows.
    For the loss of a masked language model, the result is the mean over the masked copies of the text, weighted by
    their masked tokens.
    """
    judged = JudgedTexts.of([CorpusBatch(batch, torch.tensor([0]), 0, "")], judge, batch.ids.numel())
    weights = torch.ones(1) if judged.masked is None else judged.masked.double() / judged.masked.sum()
    of_inputs = (
        weight * _weighted_gradients(model, part.batch, judged.judge.at(part.documents), layers)
        for part, weight in zip(judged.parts, weights.tolist(), strict=True)
    )
    return sum(of_inputs, start=torch.zeros(()))


def _weighted_gradients(
    model: HookedModel, batch: Batch, judge: Metric, layers: Sequence[int]
) -> Float[Tensor, "layer head query key"]:
    stack = model.output_stack
    point = stack.point("pattern")

    _, ran, gradients = differentiated(model, batch, judge, [point], layers, torch.tensor([0]))
    real = batch.queries(stack.label).mask[0]

    def of_text(values: Tensor) -> Tensor:
        wide = values[0].to(torch.promote_types(values.dtype, torch.float32))
        return wide[:, real][..., real].cpu()

    return torch.stack([of_text(ran[point, layer]) * of_text(gradients[point, layer]) for layer in layers])
