"""Splits the residual stream into the contributions of its writers, after later norms.

x_i = Σ_s w_s(i). Writers are the embeddings of token, position and token type, every head, every b_O, every MLP, and
the shift β of every norm on the way. Norms are frozen at their scales in this pass (`attnmech.maths.norms`), so the
output of a norm is again a sum over the same writers, plus β.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...batch import Batch
from ...errors import InputError
from ...maths.norms import FrozenNorm
from ...points import PointKey
from ..own.module import NO_TOKENS
from ..parts.modules import submodule
from ..parts.norms import frozen_norm
from ..run.hooked import HookedModel
from ..stack.block import PostNormEnd
from ..stack.stack import Stack


def why_no_sum(model: HookedModel) -> str | None:
    """Why a model's stream is not a sum of captured points; None if it is."""
    if model.is_own:
        return f"{NO_TOKENS}, and what it computes from them enters the stream as one value"
    if (reason := why_blocks_do_not_add(model)) is not None:
        return reason
    if not model.reads_tokens:
        return "patches or frames and their positions enter the stream as one value"
    if model.architecture.embed_projection is not None or model.embedding.shape[1] != model.d_model:
        return (
            f"its token embedding of {model.embedding.shape[1]} dimensions is projected to the {model.d_model} of the "
            "stream"
        )
    return None


def why_blocks_do_not_add(model: HookedModel) -> str | None:
    """Why the stream behind the first layer is not the sum of what enters it and of captured points; None if it is."""
    if model.architecture.no_stream:
        return model.architecture.no_stream
    if len(model.stacks) > 1:
        return "its stacks share one embedding, and attention to another stack writes into the decoder's stream"
    if model.architecture.expanded is not None:
        return "its keys and values are expanded from a latent, with a norm between attn_in and the latent"
    if model.architecture.hybrid:
        return "its layers without attention write into the stream, and no point holds their output"
    if not model.architecture.chained:
        return "something between its blocks changes the stream (DeBERTa-v2's convolution after the first)"
    return None


def most_writers(stack: Stack, layer: int) -> int:
    """The most writers below a layer: five for embeddings and norms, and the heads and four more per layer."""
    return 5 + layer * (stack.n_heads + 4)


def points_read(model: HookedModel, layers: Sequence[int]) -> list[PointKey]:
    """The points that hold what attention reads in some layers: its input and, if a norm makes it, the stream."""
    read = ["attn_in", *(["resid_pre"] if model.stack().architecture.attn_norm else [])]
    return model.points.resolve(read, layers, model.refused)


def pictures_added(model: HookedModel, batch: Batch) -> frozenset[int]:
    """The layers before which a model adds pictures to the stream, as DeepStack does."""
    return model.prove_merged(model, batch) if any(batch.senses) else frozenset()


def points_of_writers(model: HookedModel, layers: Sequence[int], batch: Batch) -> list[PointKey]:
    """The points that hold the contributions below some layers, and the inputs of the norms there."""
    stack = model.stack()
    plan = stack.architecture
    below = [layer for layer in stack.layers if layer < max(layers)]
    written = [
        "z",
        *(["mlp_out"] if plan.mlp_out is not None else []),
        *(["mixer_out"] if plan.mixer else []),
        *(["attn_raw"] if plan.attn_out else []),
        *(["resid_mid"] if plan.norm == "post" else []),
    ]
    keys = model.points.resolve(["embed"], None, model.refused) + points_read(model, layers)
    if below:
        keys += model.points.resolve(written, below, model.refused)
    for layer in pictures_added(model, batch) & {*below, max(layers)}:
        keys += [("resid_pre", layer), ("resid_post", layer - 1)]
    return [*keys, *((label, None) for label in model.further_embeddings)]


@dataclass(frozen=True)
class _Step:
    """One step of the stream: the sum so far goes through `norm`, then `write` is added."""

    label: str
    write: Callable[[], Tensor] | None
    norm: FrozenNorm | None = None


class Writers:
    """The stream of one pass, as a list of steps that grows layer by layer."""

    def __init__(self, model: HookedModel, batch: Batch) -> None:
        self._model, self._stack = model, model.stack()
        self._shape = (*batch.ids.shape, model.d_model)
        self._embedding = "embedding of tokens and pictures" if batch.senses else "token embedding"
        self._wide = torch.promote_types(model.dtype, torch.float32)
        self._pictures, self._held = pictures_added(model, batch), batch.is_sensed[..., None]
        if self._pictures and model.edited:
            raise InputError(
                f"{model.name} adds pictures to the stream between its blocks, and what it adds cannot be told from "
                "edits there. Leave the `with` block."
            )
        self._steps: list[_Step] = []
        self._depth = 0  # the list holds the steps of all layers below this one

    def parts_of(
        self, layer: int, values: Mapping[PointKey, Tensor]
    ) -> Iterator[tuple[str, Float[Tensor, "batch position d_model"]]]:
        """Each writer's label and its part of a layer's `attn_in`, in the order in which the writers write.

        The parts add up to `attn_in`. `values` holds those points of `points_of_writers` that the pass has reached.
        """
        if not self._steps:
            self._add_embeddings(values)
        for below in self._stack.layers:
            if self._depth <= below < layer:
                self._add_layer(below, values)
                if below + 1 in self._pictures:
                    added = self._held * (values["resid_pre", below + 1] - values["resid_post", below])
                    self._steps.append(_Step(f"pictures after L{below}", partial(self._everywhere, added)))
        self._depth = max(self._depth, layer)
        steps = list(self._steps)
        norm = self._stack.architecture.attn_norm
        if norm is not None:
            steps.append(self._normed("norm shift", self._stack.module(layer, norm), values["resid_pre", layer]))
        for place, step in enumerate(steps):
            if step.write is None:
                continue
            part = step.write()
            for later in steps[place + 1 :]:
                part = part if later.norm is None else later.norm(part)
            yield step.label, part

    def _add_embeddings(self, values: Mapping[PointKey, Tensor]) -> None:
        further = sorted(self._model.further_embeddings)
        written = {self._embedding: values["embed", None], **{label: values[label, None] for label in further}}
        by_label = {label: self._stack.architecture.stream_scale * value for label, value in written.items()}
        self._steps += [_Step(label, partial(self._everywhere, value)) for label, value in by_label.items()]
        norm = self._stack.architecture.embed_norm
        if norm is not None:
            total = torch.stack([value.expand(self._shape) for value in by_label.values()]).sum(dim=0)
            self._steps.append(self._normed("embedding norm shift", submodule(self._model.base, norm), total))

    def _add_layer(self, layer: int, values: Mapping[PointKey, Tensor]) -> None:
        plan, stack = self._stack.architecture, self._stack
        self._add_attention(layer, values)
        if plan.mixer:
            self._steps.append(_Step(f"L{layer} mixer", partial(self._everywhere, values["mixer_out", layer])))
        if plan.mlp_out is None:
            return
        mlp_out = values["mlp_out", layer]
        mlp = _Step(f"L{layer} MLP", partial(self._everywhere, mlp_out))
        if plan.norm == "pre":
            self._steps.append(mlp)
            return
        assert plan.mid_norm is not None and plan.post_norm is not None
        middle = values["resid_mid", layer]
        end = PostNormEnd.of(stack, layer).before_norm(middle, mlp_out)
        self._steps += [
            self._normed(f"L{layer} attention norm shift", stack.module(layer, plan.mid_norm), middle),
            mlp,
            self._normed(f"L{layer} MLP norm shift", stack.module(layer, plan.post_norm), end),
        ]

    def _add_attention(self, layer: int, values: Mapping[PointKey, Tensor]) -> None:
        """Adds every head, b_O and, if there is a norm between attention and stream, its shift."""
        stack, weights = self._stack, self._stack.weights(layer)
        path = stack.architecture.attn_out
        norm = frozen_norm(stack.module(layer, path), values["attn_raw", layer], self._wide) if path else None
        for head in range(stack.n_heads):
            z, W_O = values["z", layer][:, :, head], weights.W_O[head].detach()
            self._steps.append(_Step(f"L{layer}H{head}", partial(self._written, z, W_O, norm)))
        if weights.b_O is not None:
            b_O = weights.b_O.detach()[None]
            self._steps.append(_Step(f"L{layer} b_O", partial(self._written, b_O.new_ones(1), b_O, norm)))
        if norm is not None and norm.shift is not None:
            shift = stack.architecture.attn_scale * norm.shift
            self._steps.append(_Step(f"L{layer} attention norm shift", partial(self._everywhere, shift)))

    def _everywhere(self, value: Tensor) -> Float[Tensor, "batch position d_model"]:
        return value.to(self._wide).expand(self._shape)

    def _written(self, z: Tensor, W_O: Tensor, norm: FrozenNorm | None) -> Float[Tensor, "batch position d_model"]:
        """z W_O, through the norm between attention and stream if there is one, times the attention's factor."""
        write = self._everywhere(z.to(self._wide) @ W_O.to(self._wide)) * self._stack.architecture.attn_scale
        return write if norm is None else norm(write)

    def _normed(self, label: str, norm: nn.Module, x: Tensor) -> _Step:
        frozen = frozen_norm(norm, x, self._wide)
        return _Step(label, None if frozen.shift is None else partial(self._everywhere, frozen.shift), frozen)
