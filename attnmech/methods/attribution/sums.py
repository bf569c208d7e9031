"""Estimates the effects of patching every node, batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...activations.activations import Activations
from ...interventions import Values
from ...maths.float64 import as_float64
from ...model.run.hooked import HookedModel
from ...runs.corpus import CorpusBatch
from ...runs.gradients import differentiated
from ...runs.metrics import Metric
from .formulas import first_order, midpoints


@dataclass(frozen=True)
class Estimator:
    """The model, the prompts and the values of the clean run, from which estimates are made."""

    model: HookedModel
    judge: Metric
    """The metric of the corrupted prompts."""
    layers: Sequence[int]
    clean: Mapping[str, Mapping[int, Values]]
    """The values of the clean run: by point ("z", "mlp_out") and layer."""
    start: Values | None
    """For integrated gradients, the stream that enters the first layer in the clean run."""
    steps: int

    def of_part(self, part: CorpusBatch) -> tuple[Float[Tensor, " text"], Float[Tensor, "layer node text"]]:
        """The metric of each prompt of a batch, and the estimates of all nodes: heads, then the MLP if it is a node."""
        measured, corrupted, at_corrupted = self._differentiated(part)
        # Estimates are linear in the gradient, so those of the steps can be averaged.
        shares = midpoints(self.steps) if self.start is not None else []
        runs = (self._between(part, share) for share in shares) if shares else iter([at_corrupted])
        estimates = [self._estimates(part.documents, corrupted, gradients) for gradients in runs]
        return measured, torch.stack(estimates).mean(dim=0)

    def _estimates(
        self, texts: Int[Tensor, " text"], corrupted: Activations, gradients: Activations
    ) -> Float[Tensor, "layer node text"]:
        of_layers = []
        for layer in self.layers:
            of_points = []
            for point, clean in self.clean.items():
                here = self.model.output_stack.point(point), layer
                now = corrupted[here]
                # The gradient is 0 at padding, since nothing attends to it.
                change = as_float64(_rows(clean[layer].by_layer[layer], texts, now)) - as_float64(now)
                of_points.append(first_order(change, gradients[here]).reshape(len(texts), -1).T.cpu())
            of_layers.append(torch.cat(of_points))
        return torch.stack(of_layers)

    def _differentiated(self, part: CorpusBatch) -> tuple[Float[Tensor, " text"], Activations, Activations]:
        points = [self.model.output_stack.point(point) for point in self.clean]
        judge = self.judge.at(part.documents)
        return differentiated(self.model, part.batch, judge, points, self.layers, part.documents)

    def _between(self, part: CorpusBatch, share: float) -> Activations:
        """The gradients where the stream that enters the model lies this share of the way to the clean run's."""
        assert self.start is not None
        ((first, clean),) = self.start.by_layer.items()

        def moved(stream: Tensor) -> Tensor:
            return stream + share * (_rows(clean, part.documents, stream) - stream)

        with self.model.hooks({(self.model.output_stack.point("resid_pre"), first): moved}):
            _, _, gradients = self._differentiated(part)
        return gradients


def _rows(values: Tensor, texts: Int[Tensor, " text"], like: Tensor) -> Tensor:
    """The values of some texts, in the length, precision and device of `like`."""
    return values[texts.to(values.device), : like.shape[1]].to(like)
