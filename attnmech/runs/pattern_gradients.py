"""How does a metric of one text change with each attention probability? One forward and one backward pass."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..batch import Batch
from ..model.hooked import HookedModel
from .metrics import Metric, require_finite


def pattern_gradients(
    model: HookedModel, batch: Batch, judge: Metric, layers: Sequence[int]
) -> tuple[Float[Tensor, "layer head query key"], Float[Tensor, "layer head query key"]]:
    """The pattern of one text and ∂metric/∂p, between its real tokens; padding is left out.

    Each p_ij is moved alone: rows need not sum to 1 any more, and what follows from them moves too.
    """
    stack = model.output_stack
    point = stack.point("pattern")

    def measure(logits: Tensor, given: Batch) -> Tensor:
        found = judge.of_logits(logits, given.queries(stack.label))
        require_finite(judge.name, found.detach().cpu(), [0], "with nothing changed")
        return found

    ran = model.run(batch, [point], layers=layers, gradients_of=measure)
    assert ran.gradients is not None
    real = batch.queries(stack.label).mask[0]

    def of_text(values: Tensor) -> Tensor:
        wide = values[0].to(torch.promote_types(values.dtype, torch.float32))
        return wide[:, real][..., real].cpu()

    patterns = torch.stack([of_text(ran[point, layer]) for layer in layers])
    return patterns, torch.stack([of_text(ran.gradients[point, layer]) for layer in layers])
