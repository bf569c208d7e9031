"""Reads a model's residual graph, and the steps along its edges: what senders write, and what receivers read."""

from collections.abc import Mapping
from typing import Final

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from ..batch import Batch
from ..errors import InputError
from ..model.parts.norms import frozen_norm
from ..model.reading.partial_pass import can_begin_in_the_middle
from ..model.reading.writers import pictures_added, why_blocks_do_not_add
from ..model.run.hooked import HookedModel
from ..results.graph import INPUTS, Graph

OF_SENDERS: Final = ("z", "mlp_out")  # the points of a layer at which its senders write


def graph_of(model: HookedModel, *, mlps: bool = True) -> Graph:
    """The residual graph of a model; raises `InputError` for a model whose nodes do not add to one stream."""
    if (reason := _why_no_graph(model)) is not None:
        raise InputError(f"edges need a stream that is the sum of what nodes write; on {model.name}, {reason}.")
    stack = model.output_stack
    plan = stack.architecture
    mlps = mlps and plan.mlp_out is not None
    return Graph(len(stack.layers), stack.n_heads, stack.n_kv_heads, mlps, plan.mid_norm is None)


def require_one_sum(model: HookedModel, batch: Batch) -> None:
    """Raises `InputError` if pictures enter the stream behind layer 0, where the graph has no sender."""
    if pictures_added(model, batch):
        raise InputError(
            f"{model.name} adds pictures to the stream between its blocks, and a graph has no node for them. Give "
            "texts without pictures, or attribute to heads instead of edges."
        )


def _why_no_graph(model: HookedModel) -> str | None:
    if (reason := why_blocks_do_not_add(model)) is not None:
        return reason
    plan = model.output_stack.architecture
    if plan.idle:
        return "some layers do not run on text, and a graph numbers its layers without gaps"
    if plan.mixer:
        return "a mixer writes beside attention"
    if plan.norm == "post":
        return "norms between the blocks change what nodes write"
    if plan.gate is not None:
        return "a gate reads the stream beside q, k and v"
    if plan.v_norm:
        return "a norm follows v"
    if not can_begin_in_the_middle(model):
        return "blocks need more than the stream"
    if model.edited:
        return f"hooks or interventions are active ({', '.join(model.edited)}); leave the `with` block"
    return None


class Steps:
    """The steps between the points of a model along the edges of its residual graph."""

    def __init__(self, model: HookedModel, *, frozen: bool = False) -> None:
        """With `frozen`, derivatives take the scales of norms as constants."""
        self._stack, self._frozen = model.output_stack, frozen
        self._plan = self._stack.architecture
        self.layers = self._stack.layers

    def raw(
        self, layer: int, z: Float[Tensor, "batch position head d_value"]
    ) -> Float[Tensor, "head batch position d_model"]:
        """z W_O, head by head: the parts of attn_raw."""
        W_O = self._stack.weights(layer).W_O.detach().to(z)
        return einsum(z, W_O, "batch position head d_value, head d_value d_model -> head batch position d_model")

    def norm_of_output(self, layer: int) -> nn.Module | None:
        """The norm between attn_raw and the stream; None without one."""
        path = self._plan.attn_out
        return self._stack.module(layer, path) if path not in ("", self._plan.out) else None

    def written(
        self,
        layer: int,
        change: Float[Tensor, "*change batch position d_model"],
        raw: Float[Tensor, "batch position d_model"],
    ) -> Float[Tensor, "*change batch position d_model"]:
        """The change of attn_out when attn_raw changes by `change`."""
        norm = self.norm_of_output(layer)
        return self._plan.attn_scale * (change if norm is None else norm.forward(raw + change) - norm.forward(raw))

    def written_to_first_order(
        self,
        layer: int,
        change: Float[Tensor, "head batch position d_model"],
        raw: Float[Tensor, "batch position d_model"] | None,
    ) -> Float[Tensor, "head batch position d_model"]:
        """The derivative of attn_out along each change of attn_raw; `raw` is needed if a norm follows."""
        norm = self.norm_of_output(layer)
        if norm is not None and raw is not None and self._frozen:
            change = frozen_norm(norm, raw, change.dtype)(change)
        elif norm is not None and raw is not None:
            point = raw.expand_as(change).contiguous()
            change = torch.autograd.functional.jvp(norm.forward, point, change.to(raw))[1]  # type: ignore[no-untyped-call]
        return self._plan.attn_scale * change.detach()

    def read(
        self, layer: int, point: str, head: int, stream: Float[Tensor, "*some batch position d_model"]
    ) -> Float[Tensor, "*some batch position d_head"]:
        """q, k or v of a head (for k and v, of a kv head) that reads this stream."""
        norm = self._attention_norm(layer)
        W, b = self._projection(layer, point)
        normed = stream if norm is None else norm.forward(stream)
        made = normed @ W[head].to(normed)
        return made if b is None else made + b[head].to(normed)

    def pulled_back(
        self,
        layer: int,
        gradients: Mapping[str, Float[Tensor, "batch position _ d_head"]],
        stream: Float[Tensor, "batch position d_model"],
    ) -> Float[Tensor, "input batch position d_model"]:
        """The gradient at the stream through each input of each head, from the gradients at q, k and v."""
        at_norm = torch.cat(
            [
                einsum(
                    gradients[point], self._projection(layer, point)[0].to(gradients[point]),
                    "batch position head d_head, head d_model d_head -> head batch position d_model",
                )
                for point in INPUTS
            ]
        )  # fmt: skip
        norm = self._attention_norm(layer)
        if norm is None:
            return at_norm
        if self._frozen:
            frozen = frozen_norm(norm, stream, at_norm.dtype)
            scaled = frozen.multiplier * at_norm
            return (scaled - scaled.mean(dim=-1, keepdim=True) if frozen.centred else scaled).detach()
        with torch.enable_grad():
            x = stream.expand_as(at_norm).detach().requires_grad_()
            (pulled,) = torch.autograd.grad(norm.forward(x), x, at_norm)
        return pulled

    def _attention_norm(self, layer: int) -> nn.Module | None:
        path = self._plan.attn_norm
        return None if path is None else self._stack.module(layer, path)

    def _projection(self, layer: int, point: str) -> tuple[Tensor, Tensor | None]:
        weights = self._stack.weights(layer)
        matrix, bias = {
            "q": (weights.W_Q, weights.b_Q),
            "k": (weights.W_K, weights.b_K),
            "v": (weights.W_V, weights.b_V),
        }[point]
        return matrix.detach(), None if bias is None else bias.detach()
