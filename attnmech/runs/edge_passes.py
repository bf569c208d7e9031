"""Runs a model with some edges of its residual graph patched: their receivers read what their senders write in another
run.

The input of a receiver is its stream plus, for every patched edge into it, the sender's write in the other run minus
its write in this one. Everything else, later senders included, is computed from these inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from ..interventions import Values
from ..model.attention.in_force import Hook
from ..model.reading.partial_pass import Blocks
from ..model.run.hooked import HookedModel
from ..points import PointKey, PointName
from ..results.graph import INPUTS, Graph
from .corpus import CorpusBatch
from .metrics import Metric, require_finite
from .outputs import Judging, Output
from .progress import steps
from .residual_graph import OF_SENDERS, Steps, require_one_sum


@dataclass(frozen=True)
class Written:
    """What the senders of a layer write in one pass, and the change to what they write in the other run."""

    raw: Float[Tensor, "batch position d_model"]  # attn_raw in this pass
    heads: Float[Tensor, "head batch position d_model"]  # the change of attn_raw, head by head
    mlp: Float[Tensor, "batch position d_model"] | None  # the change of mlp_out


class EdgePasses:
    """Passes over the texts of one batch, with any edges patched."""

    def __init__(
        self,
        model: HookedModel,
        graph: Graph,
        part: CorpusBatch,
        other: Mapping[str, Mapping[int, Values]],
        memory: float,
    ) -> None:
        """`other`: the senders' values in the other run, by point ("z", "mlp_out", the first "resid_pre") and layer."""
        self._model, self._graph, self._part, self._other = model, graph, part, other
        require_one_sum(model, part.batch)
        self._blocks, self._steps = Blocks(model), Steps(model)
        self._layers = self._steps.layers
        keys = [(point, layer) for layer in self._layers for point in (*OF_SENDERS, "attn_raw") if self._holds(point)]
        ran = self._blocks.run(part.batch, streams=range(len(self._layers) + 1), captures=keys)
        self._streams = ran.streams
        first = ran.streams[0]
        self._embedding = self._of_other("resid_pre", self._layers[0], first) - first
        with torch.no_grad():
            self._written = [self._change(layer, ran.values) for layer in self._layers]
        self._queries = part.batch.queries(model.output_stack.label)
        per_row = 4 * max(4, model.dtype.itemsize) * max(model.n_vocab, 1)
        self._rows = max(1, int(memory * 1e9 / 4 / per_row))

    @torch.no_grad()
    def metric(self, judge: Metric, patched: Bool[Tensor, "sender receiver"]) -> Float[Tensor, " text"]:
        judge, depth = judge.at(self._part.documents), len(self._layers)
        clean = Output(self._streams[depth], None)
        judging = Judging(self._part.batch, self._queries, self._blocks, clean, self._rows)
        values = judging.of(Output(self._final_stream(patched), None) if patched.any() else clean, 1, judge)[0]
        require_finite(judge.name, values, self._part.documents.tolist(), f"with {int(patched.sum())} edges patched")
        return values

    def _holds(self, point: str) -> bool:
        return point != "mlp_out" or self._graph.mlps

    def _of_other(self, point: str, layer: int, like: Tensor) -> Tensor:
        values = self._other[point][layer].by_layer[layer]
        return (values[self._part.documents.to(values.device), : like.shape[1]] if len(values) > 1 else values).to(like)

    def _change(self, layer: int, values: Mapping[PointKey, Tensor]) -> Written:
        z = values["z", layer]
        heads = self._steps.raw(layer, self._of_other("z", layer, z) - z)
        mlp = None
        if self._graph.mlps:
            mlp = self._of_other("mlp_out", layer, values["mlp_out", layer]) - values["mlp_out", layer]
        return Written(values["attn_raw", layer], heads, mlp)

    def _final_stream(self, patched: Bool[Tensor, "sender receiver"]) -> Float[Tensor, "batch position d_model"]:
        depth, graph = len(self._layers), self._graph
        reads = [bool(patched[:, graph.receivers_of(number)].any()) for number in range(depth)]
        first = reads.index(True) if any(reads) else depth
        # Layers above the last patched receiver run in one go, unless the logits read some of their senders otherwise.
        last = depth if patched[:, -1].any() else depth - reads[::-1].index(True) if any(reads) else depth
        written, stream = list(self._written[:first]), self._streams[first]
        for number in range(first, last):
            stream, made = self._layer(number, stream, patched[:, graph.receivers_of(number)], written)
            written.append(made)
        if last < depth:
            return self._blocks.run(self._part.batch, start=last, stream=stream, streams=[depth]).streams[depth]
        return stream + self._moved(patched[:, -1:].T, written)[0]

    def _layer(
        self,
        number: int,
        stream: Float[Tensor, "batch position d_model"],
        patched: Bool[Tensor, "sender receiver"],
        written: Sequence[Written],
    ) -> tuple[Float[Tensor, "batch position d_model"], Written]:
        """The stream after a layer, and what its senders write."""
        layer, graph = self._layers[number], self._graph
        at_mlp = patched[:, -1:].T if graph.mlps else patched[:, :0].T
        edits = self._edits(layer, stream, patched[:, :-1] if graph.mlps else patched, written)
        after, values = self._block(number, stream, edits)
        if at_mlp.any():
            moved = self._moved(at_mlp, written if graph.parallel else [*written, self._change(layer, values)])[0]
            point = "resid_pre" if graph.parallel else "resid_mid"
            _, own = self._block(number, stream, {**edits, (point, layer): lambda read: read + moved})
            values = {**values, ("mlp_out", layer): own["mlp_out", layer]}
            after = stream + values["attn_out", layer] + values["mlp_out", layer]
        return after, self._change(layer, values)

    def _block(
        self, number: int, stream: Float[Tensor, "batch position d_model"], edits: Mapping[PointName, Hook]
    ) -> tuple[Float[Tensor, "batch position d_model"], Mapping[PointKey, Tensor]]:
        keys = [(point, self._layers[number]) for point in (*OF_SENDERS, "attn_raw", "attn_out") if self._holds(point)]
        end = len(self._layers)  # blocks that are left out pass the stream on
        with self._model.hooks(edits):
            ran = self._blocks.run(
                self._part.batch, start=number, stream=stream, stop=number + 1, streams=[end], captures=keys
            )
        return ran.streams[end], ran.values

    def _edits(
        self,
        layer: int,
        stream: Float[Tensor, "batch position d_model"],
        patched: Bool[Tensor, "sender input"],
        written: Sequence[Written],
    ) -> dict[PointName, Hook]:
        """Hooks that give each patched q, k and v of a layer what it makes of its own stream."""
        graph = self._graph
        masks, of_input = torch.unique(patched.T, dim=0, return_inverse=True)
        streams = stream + self._moved(masks, written)
        ends = [0, graph.n_heads, graph.n_heads + graph.n_kv_heads, len(of_input)]
        edits: dict[PointName, Hook] = {}
        for point, start, stop in zip(INPUTS, ends, ends[1:], strict=False):
            changed = {
                head: self._steps.read(layer, point, head, streams[of_input[start + head]])
                for head in range(stop - start)
                if patched[:, start + head].any()
            }
            if changed:
                edits[point, layer] = _replacing(changed)
        return edits

    def _moved(
        self, masks: Bool[Tensor, "receiver sender"], written: Sequence[Written]
    ) -> Float[Tensor, "receiver batch position d_model"]:
        """How far patched edges move the streams of some receivers, from what the layers below write."""
        weights, graph = masks.to(self._embedding), self._graph
        total = weights[:, 0, None, None, None] * self._embedding
        for number, made in enumerate(written):
            of_layer = weights[:, graph.senders_of(number)]
            if not of_layer.any():
                continue
            change = einsum(of_layer[:, : graph.n_heads], made.heads, "receiver head, head ... -> receiver ...")
            total = total + self._steps.written(self._layers[number], change, made.raw)
            if made.mlp is not None:
                total = total + of_layer[:, -1, None, None, None] * made.mlp
        return total


def patched_edges(
    model: HookedModel,
    graph: Graph,
    parts: Sequence[CorpusBatch],
    other: Mapping[str, Mapping[int, Values]],
    judge: Metric,
    patched: Sequence[Bool[Tensor, "sender receiver"]],
    options: Mapping[str, Any],
) -> Float[Tensor, "change text"]:
    texts = sum(len(part.documents) for part in parts)
    measured = torch.empty(len(patched), texts, dtype=torch.float64)
    with steps("patched edges", len(patched) * texts, show=options.get("progress", False)) as bar:
        for part in parts:
            passes = EdgePasses(model, graph, part, other, options.get("memory", 1.0))
            for number, mask in enumerate(patched):
                measured[number, part.documents] = passes.metric(judge, mask)
                bar.advance(len(part.documents))
    return measured


def _replacing(changed: Mapping[int, Float[Tensor, "batch position d_head"]]) -> Hook:
    def replaced(value: Float[Tensor, "batch position head d_head"]) -> Float[Tensor, "batch position head d_head"]:
        new = value.clone()
        for head, own in changed.items():
            new[:, :, head] = own
        return new

    return replaced
