"""Lists the points of a model with their sizes, and says why others are missing; finds the heads of a selection."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, get_args

import pandas as pd
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ...basics.arguments import index_of, integer, listed, shown
from ...batch import Batch
from ...errors import CertificateError, InputError, MissingPointError
from ...interventions import Head, Heads, checked_heads
from ...points import POINTS, Point, PointKey, PointName, parse, point_of, split_stack
from ..own.module import NO_TOKENS, OwnModule
from ..structure.architecture import Architecture
from .stack import Stack

MAX_BYTES: Final = 4 * 2**30
"""The maximum number of bytes that a run keeps: a 16 GB laptop has room for it next to a model, and it is seven times
the size of GPT-2's patterns over 1,024 tokens."""


@dataclass(frozen=True)
class ModelPoint:
    """One point of one model: its axes with their sizes and its meaning, or the reason why it is missing."""

    name: str
    shape: str
    """The axes, with the sizes that the model fixes: "batch position head=8 d_head=16"."""
    meaning: str
    absent: str | None
    """Why this model does not have the point; None if it does."""


class ModelPoints(Mapping[str, ModelPoint]):
    """The points of one model, displayed as a table."""

    def __init__(self, entries: Iterable[ModelPoint], layers: Mapping[str, tuple[int, ...]]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._layers = layers

    def __getitem__(self, name: str) -> ModelPoint:
        if not isinstance(name, str) or name not in self._entries:
            raise MissingPointError(f"this model has no point {shown(name)}; its points are: {', '.join(self)}.")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(
        self, names: Iterable[PointName], layers: Iterable[int] | None = None, refused: Mapping[str, str] | None = None
    ) -> list[PointKey]:
        """The (name, layer) keys that a user's names refer to; a name alone means every layer in `layers`.

        Raises, with the reason, `InputError` for an unknown point or a layer out of range, `MissingPointError` for a
        point that this model lacks, and `CertificateError` for a point in `refused`.
        """
        chosen = _chosen(layers)
        keys: dict[PointKey, None] = {}
        for name in [names] if isinstance(names, str) else names:
            full, layer = parse(name)
            entry = self._entry(full)
            if entry.absent is not None:
                raise MissingPointError(f"this model has no point {full!r}: {entry.absent}.")
            if refused and full in refused:
                raise CertificateError(f"point {full!r} is refused on this model: {refused[full]}.")
            if not point_of(full).per_layer:
                keys[full, None] = None
                continue
            wanted = self.check_layers(chosen if layer is None else [layer], split_stack(full)[0])
            keys.update(dict.fromkeys((full, chosen_layer) for chosen_layer in wanted))
        return list(keys)

    def _entry(self, name: str) -> ModelPoint:
        if name in self._entries:
            return self._entries[name]
        stacks = ", ".join(repr(f"{stack}.{split_stack(name)[1]}") for stack in self._layers if stack)
        if stacks:
            raise InputError(f"this model has several stacks: choose one for {name!r}: {stacks}.")
        raise InputError(
            f"this model has one stack, so its points have no prefix: {split_stack(name)[1]!r}; got {name!r}."
        )

    def check_layers(self, layers: Iterable[int] | None, stack: str = "") -> list[int]:
        """The selected layers of a stack, or all layers for None; raises `InputError` if one is out of range."""
        there = self._layers[stack]
        chosen = _chosen(layers)
        if chosen is None:
            return list(there)
        for layer in chosen:
            if layer not in there:
                owner = f"its {stack} stack" if stack else "this model"
                known = f"one of {', '.join(map(str, there))} (the layers of {owner} with attention)"
                if there == tuple(range(len(there))):
                    known = f"from 0 to {len(there) - 1} ({owner} has {len(there)} layers)"
                raise InputError(f"`layer` must be {known}; got {layer}.")
        if not chosen:
            raise InputError("`layers` must name at least one layer; got an empty list.")
        return chosen

    def to_frame(self) -> pd.DataFrame:
        """One row per point: point, shape, meaning, absent."""
        return pd.DataFrame(
            [(p.name, p.shape, p.meaning, p.absent or "") for p in self.values()],
            columns=["point", "shape", "meaning", "absent"],
        )

    def __repr__(self) -> str:
        width = max(len(name) for name in self)
        lines = []
        for point in self.values():
            description = f"{point.shape}  {point.meaning}" if point.absent is None else f"absent: {point.absent}"
            lines.append(f"{point.name:<{width}}  {description}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, escape=True)


def check_size(
    keys: Iterable[PointKey], stacks: Mapping[str, Stack], batch: Batch, itemsize: int, *, gradients: bool
) -> None:
    """Raises `InputError` if the values at the points would take more than `MAX_BYTES` on this batch.

    `gradients` doubles the number of values. Logits do not count, since every call computes them.
    """
    sizes: dict[str, int] = {}
    for name, _ in keys:
        if name != "logits":
            sizes[name] = sizes.get(name, 0) + _numbers(name, stacks, batch) * itemsize * (2 if gradients else 1)
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        of_gradients = " with their gradients" if gradients else ""
        raise InputError(
            f"the requested values{of_gradients} would take {total / 2**30:.1f} GiB ({largest!r} alone "
            f"{sizes[largest] / 2**30:.1f}); the limit is {MAX_BYTES / 2**30:.0f} GiB. Choose fewer layers "
            "(layers=[0]) or a shorter text, or reduce the values during the run: am.stream(model, inputs, [reducer])."
        )


def _numbers(name: str, stacks: Mapping[str, Stack], batch: Batch) -> int:
    """The number of values of a point in one layer on a batch."""
    label = split_stack(name)[0]
    stack = stacks.get(label) or next(iter(stacks.values()))
    queries = batch.queries(label).ids.shape[1]
    sizes = stack.sizes(split_stack(name)[1]) | {
        "batch": len(batch.ids),
        "position": queries,
        "query": queries,
        "key": batch.keys(label).ids.shape[1],
    }
    axes = point_of(name).axes
    if label == "cross" and "kv_head" in axes:
        sizes["position"] = sizes["key"]
    return prod(sizes[axis] for axis in axes)


def _chosen(layers: Any) -> list[int] | None:
    """The layers of a selection (a single one or several) as ints; None for all of them."""
    if layers is None:
        return None
    try:
        return [integer(layers)]
    except TypeError:
        several = listed("layers", layers, "a list of ints")
    try:
        return [integer(layer) for layer in several]
    except TypeError:
        raise InputError(f"`layers` must be a list of ints; got {shown(layers)}.") from None


def has_head(model: PreTrainedModel) -> bool:
    """Whether the model returns logits; True for a user's own module, whatever it returns."""
    if isinstance(model, OwnModule):
        return True
    returned = inspect.signature(type(model).forward).return_annotation
    kinds = [kind for kind in (returned, *get_args(returned)) if isinstance(kind, type)]
    outputs = [kind for kind in kinds if issubclass(kind, ModelOutput)]
    declares = any("logits" in getattr(output, "__dataclass_fields__", ()) for output in outputs)
    unembeds = model.get_output_embeddings() is not None  # type: ignore[no-untyped-call]
    if declares or (outputs and not unembeds):
        return declares
    return model.base_model is not model or unembeds


def points_of(stacks: Sequence[Stack], has_logits: bool) -> ModelPoints:
    """The points of a model with these stacks, with their sizes."""
    outside = {}
    if stacks[0].label:
        outside["embed"] = "the stacks share one embedding, which runs once for each; resid_pre of layer 0 holds it"
    if stacks[0].architecture.reads == "pixels":
        outside["embed"] = "an image has no tokens; its patches are projected, and resid_pre of layer 0 holds them"
    if stacks[0].architecture.reads == "sound":
        outside["embed"] = "sound has no tokens; its frames are projected, and resid_pre of layer 0 holds them"
        if stacks[0].label:
            outside["embed"] = (
                "its encoder projects frames of sound and its decoder embeds tokens; resid_pre of layer 0 of each "
                "holds what enters it"
            )
    if stacks[0].architecture.reads == "tensors":
        outside["embed"] = NO_TOKENS
    if not has_logits:
        outside["logits"] = "this model was loaded without a head on top; its final stream is resid_post"
    entries = []
    for point in POINTS.values():
        if not point.per_layer:
            entries.append(_entry_of(point, point.name, stacks[0], outside.get(point.name)))
            continue
        for stack in stacks:
            reason = _absent_in(stack.architecture).get(point.name)
            entries.append(_entry_of(point, stack.point(point.name), stack, reason))
    return ModelPoints(entries, {stack.label: stack.layers for stack in stacks})


def _absent_in(plan: Architecture) -> dict[str, str]:
    """The points that every layer of a stack lacks, with the reason."""
    absent: dict[str, str] = {}
    if not plan.streams:
        reason = plan.no_stream or "its attention is not inside a module that takes and returns a stream"
        if plan.within:
            reason = f"{reason}: it is part of the decoder's blocks (decoder.resid_mid enters it)"
        absent |= dict.fromkeys(("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"), reason)
        if plan.attn_out:
            absent.pop("attn_out")
    if plan.rotary is None:
        reason = f"{plan.name} does not rotate queries and keys, so the scores use q and k themselves"
        absent |= {"q_rot": reason, "k_rot": reason}
    if plan.expanded is None:
        absent["latent"] = f"{plan.name} makes keys and values directly from attn_in, without a latent"
    if plan.gate is None:
        absent["gate"] = f"{plan.name} has no gate, and no norm, between attention and W_O"
    if not plan.mixer:
        absent["mixer_out"] = f"{plan.name} has no mixer beside attention"
    if plan.streams and plan.mlp_out is None:
        reason = f"the blocks of {plan.name} with attention have no MLP; resid_post is resid_pre + attn_out"
        if plan.stack:
            reason = (
                f"the {plan.stack} stack has no MLP; resid_post is resid_pre + attn_out, and the decoder continues "
                "from it"
            )
        absent |= {"resid_mid": reason, "mlp_out": reason}
    elif plan.streams and plan.mid_norm is None:
        absent["resid_mid"] = f"{plan.name} adds attention and MLP to the stream in one step"
    return absent


def _meanings(plan: Architecture) -> dict[str, str]:
    """The meanings of points that differ from the general ones in this stack (latents, a user's own module)."""
    if plan.expanded is None:
        return {}
    meanings = {
        "attn_in": "input of the projections to latents and to the part of the keys that heads share",
        "k": "(latent, attn_in) W_K + b_K, before rotary",
        "v": "latent W_V + b_V",
    }
    if plan.expanded.query_latent is not None:
        meanings["q"] = "W_Q of the queries' own latent + b_Q, before rotary"
    return meanings


def _entry_of(point: Point, name: str, stack: Stack, absent: str | None) -> ModelPoint:
    if stack.architecture.reads == "tensors" and point.name == "logits":
        return ModelPoint(name, "as the module returns it", "the first tensor that the module returns", absent)
    sizes = stack.sizes(point.name)
    meaning = _meanings(stack.architecture).get(point.name, point.meaning)
    shape = " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in point.axes)
    return ModelPoint(name, shape, meaning, absent)


def selected_heads(
    points: ModelPoints, stack: Stack, heads: Heads, layers: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """The (layer, head) pairs of a selection, in order; raises `InputError` for a head that the stack does not have."""
    within = points.check_layers(layers, stack.label)
    named = checked_heads(heads)
    if named == "all":
        return [(layer, head) for layer in within for head in range(stack.n_heads)]
    require_heads(points, stack, named, within, "of each layer of this model")
    return sorted(named)


def require_heads(points: ModelPoints, stack: Stack, heads: Sequence[Head], within: Sequence[int], owner: str) -> None:
    """Raises `InputError` for a head that the stack does not have, or whose layer is not in `within`."""
    points.check_layers([layer for layer, _ in heads], stack.label)
    for _, head in heads:
        index_of("head", head, stack.n_heads, owner)
    for layer, _ in heads:
        if layer not in within:
            raise InputError(f"`heads` names layer {layer}, which is not in `layers`; give only one of the two.")
