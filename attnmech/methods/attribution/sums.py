"""Estimates the effects of patching nodes and edges, batch by batch (docs/formulas.md#attribution)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from ...activations.activations import Activations
from ...interventions import Values
from ...maths.float64 import as_float64
from ...model.run.hooked import HookedModel
from ...results.graph import INPUTS, Graph
from ...runs.corpus import CorpusBatch
from ...runs.gradients import differentiated
from ...runs.metrics import Metric
from ...runs.residual_graph import Steps
from .formulas import first_order, midpoints


@dataclass(frozen=True)
class Estimator(ABC):
    """The model, the prompts and the values of the clean run, from which estimates are made."""

    model: HookedModel
    judge: Metric
    """The metric of the corrupted prompts."""
    layers: Sequence[int]
    clean: Mapping[str, Mapping[int, Values]]
    """The values of the clean run by point and layer: at the points at which senders write ("z", "mlp_out"); for edges
    and integrated gradients also "resid_pre" of the first layer."""
    method: str
    steps: int

    def of_part(self, part: CorpusBatch) -> tuple[Float[Tensor, " text"], Float[Tensor, "*place text"]]:
        """The metric of each prompt of a batch, and all estimates."""
        measured, corrupted, gradients = self._differentiated(part)
        runs = iter([(corrupted, gradients)])
        if self.method == "integrated":
            # Estimates are linear in the gradient, so those of the steps can be averaged.
            runs = (self._between(part, share) for share in midpoints(self.steps))
        estimates = [self._estimates(part.documents, corrupted, *run) for run in runs]
        return measured, torch.stack(estimates).mean(dim=0)

    @abstractmethod
    def _estimates(
        self, texts: Int[Tensor, " text"], corrupted: Activations, here: Activations, gradients: Activations
    ) -> Float[Tensor, "*place text"]:
        """The estimates, from the corrupted run, and from values and gradients of the run that is differentiated."""

    @property
    def _points(self) -> list[str]:
        return self._sending

    @property
    def _sending(self) -> list[str]:
        return [point for point in self.clean if point != "resid_pre"]

    def _change(
        self, point: str, layer: int, texts: Int[Tensor, " text"], corrupted: Activations
    ) -> Float[Tensor, "text position *node d"]:
        """The value of the clean run minus that of the corrupted run."""
        now = corrupted[self.model.output_stack.point(point), layer]
        return as_float64(_rows(self.clean[point][layer].by_layer[layer], texts, now)) - as_float64(now)

    def _differentiated(self, part: CorpusBatch) -> tuple[Float[Tensor, " text"], Activations, Activations]:
        points = [self.model.output_stack.point(point) for point in self._points]
        judge = self.judge.at(part.documents)
        return differentiated(self.model, part.batch, judge, points, self.layers, part.documents)

    def _between(self, part: CorpusBatch, share: float) -> tuple[Activations, Activations]:
        """Values and gradients where the stream that enters the model lies this share of the way to the clean run's."""
        ((first, values),) = self.clean["resid_pre"].items()
        clean = values.by_layer[first]

        def moved(stream: Tensor) -> Tensor:
            return stream + share * (_rows(clean, part.documents, stream) - stream)

        with self.model.hooks({(self.model.output_stack.point("resid_pre"), first): moved}):
            _, here, gradients = self._differentiated(part)
        return here, gradients


class NodeEstimator(Estimator):
    """The estimates of all nodes: heads, then the MLP if it is a node."""

    def _estimates(
        self, texts: Int[Tensor, " text"], corrupted: Activations, here: Activations, gradients: Activations
    ) -> Float[Tensor, "layer node text"]:
        del here
        of_layers = []
        for layer in self.layers:
            of_points = []
            for point in self._sending:
                change = self._change(point, layer, texts, corrupted)
                # The gradient is 0 at padding, since nothing attends to it.
                gradient = gradients[self.model.output_stack.point(point), layer]
                of_points.append(first_order(change, gradient).reshape(len(texts), -1).T.cpu())
            of_layers.append(torch.cat(of_points))
        return torch.stack(of_layers)


@dataclass(frozen=True)
class EdgeEstimator(Estimator):
    """The estimates of all edges of a graph: the change of what a sender writes, times the gradient at a receiver."""

    graph: Graph

    @property
    def _along(self) -> Steps:
        return Steps(self.model, frozen=self.method == "relp")

    @property
    def _points(self) -> list[str]:
        norm = ["attn_raw"] if self._along.norm_of_output(self.layers[0]) is not None else []
        middle = ["resid_mid"] if self.graph.mlps and not self.graph.parallel else []
        return [*self._sending, *INPUTS, *norm, "resid_pre", *middle, "resid_post"]

    def _estimates(
        self, texts: Int[Tensor, " text"], corrupted: Activations, here: Activations, gradients: Activations
    ) -> Float[Tensor, "edge text"]:
        graph = self.graph
        embedding = self._change("resid_pre", self.layers[0], texts, corrupted)
        sent = embedding.new_zeros(len(graph.senders), *embedding.shape)
        sent[0] = embedding
        products: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            mine = graph.senders_of(number)
            sent[mine.start : mine.start + graph.n_heads] = as_float64(self._written(layer, texts, corrupted, here))
            if graph.mlps:
                sent[mine.stop - 1] = self._change("mlp_out", layer, texts, corrupted)
            inputs, mlp = self._received(layer, here, gradients)
            products.append(_products(sent[: mine.start], inputs))
            if graph.mlps:
                products.append(_products(sent[: mine.start if graph.parallel else mine.stop - 1], mlp[None]))
        products.append(_products(sent, gradients["resid_post", self.layers[-1]][None]))
        # Receiver by receiver, and sender by sender for each: the order of `Graph.edges`.
        return torch.cat([by_receiver.flatten(0, 1) for by_receiver in products]).cpu()

    def _written(
        self, layer: int, texts: Int[Tensor, " text"], corrupted: Activations, here: Activations
    ) -> Float[Tensor, "head batch position d_model"]:
        """The change of what each head writes, to first order where a norm follows."""
        steps, dtype = self._along, self.model.dtype
        change = steps.raw(
            layer, self._change("z", layer, texts, corrupted).to(torch.promote_types(dtype, torch.float32))
        )
        raw = here["attn_raw", layer] if steps.norm_of_output(layer) is not None else None
        return steps.written_to_first_order(layer, change, raw)

    def _received(
        self, layer: int, here: Activations, gradients: Activations
    ) -> tuple[Float[Tensor, "input batch position d_model"], Float[Tensor, "batch position d_model"]]:
        """The gradient at the stream through q, k and v of each head, and through the MLP."""
        at_qkv = {point: gradients[point, layer] for point in INPUTS}
        inputs = self._along.pulled_back(layer, at_qkv, here["resid_pre", layer])
        # The gradient before the MLP is the sum of that through the MLP and that through the stream beside it.
        after = gradients["resid_post", layer]
        if self.graph.parallel:
            return inputs, gradients["resid_pre", layer] - after - inputs.sum(dim=0)
        return inputs, (gradients["resid_mid", layer] - after) if self.graph.mlps else after


def _products(
    sent: Float[Tensor, "sender batch position d_model"], received: Float[Tensor, "receiver batch position d_model"]
) -> Float[Tensor, "receiver sender batch"]:
    return einsum(
        as_float64(received).to(sent), sent,
        "receiver batch position d, sender batch position d -> receiver sender batch",
    )  # fmt: skip


def _rows(values: Tensor, texts: Int[Tensor, " text"], like: Tensor) -> Tensor:
    """The values of some texts, in the length, precision and device of `like`."""
    return values[texts.to(values.device), : like.shape[1]].to(like)
