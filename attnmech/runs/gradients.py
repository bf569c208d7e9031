"""Differentiates a metric of a batch of texts with respect to points of the model."""

from collections.abc import Sequence
from typing import Final

from jaxtyping import Float, Int
from torch import Tensor

from ..activations.activations import Activations
from ..batch import Batch
from ..model.run.hooked import HookedModel
from .metrics import Metric, require_finite

STEP_TOKENS: Final = 2048  # the approximate number of tokens in one pass


def tokens_at_once(model: HookedModel, memory: float) -> int:
    """Returns the number of tokens whose forward and backward pass fits into `memory` GB."""
    # Each layer stores about 40 vectors of the stream's width; logits are stored with their softmax and gradients.
    per_token = 4 * (40 * model.n_layers * model.d_model + 5 * model.n_vocab)
    return max(1, min(STEP_TOKENS, int(memory * 1e9 / per_token)))


def differentiated(
    model: HookedModel,
    batch: Batch,
    judge: Metric,
    points: Sequence[str],
    layers: Sequence[int],
    texts: Int[Tensor, " text"],
) -> tuple[Float[Tensor, " text"], Activations, Activations]:
    """Returns the metric of each text, the values at the points, and the metric's gradients there, from one forward and
    one backward pass; `texts` numbers the batch's texts.

    Raises `InputError` for a metric without a gradient, or that is not finite.
    """
    measured: list[Tensor] = []

    def measure(logits: Tensor, of_run: Batch) -> Tensor:
        values = judge.of_logits(logits, of_run.queries(model.output_stack.label))
        judge.require_graph(values)
        require_finite(judge.name, values.detach().cpu(), texts.tolist(), "with nothing changed")
        measured.append(values.detach().cpu())
        return values

    ran = model.run(batch, points, layers=layers, gradients_of=measure)
    assert ran.gradients is not None
    return measured[0], ran, ran.gradients
