"""Describes where an edit acts, and holds the tensors with which it replaces values, or which it adds to them."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..basics.arguments import dense, integer, shown
from ..basics.public import public
from ..batch import Batch
from ..errors import InputError
from ..points import POINTS


@dataclass(frozen=True)
class Place:
    """The part of a model on which an edit acts."""

    stack: str
    layers: tuple[int, ...]
    sizes: Mapping[str, int]  # the sizes of the point's axes, by name
    no_special_keys: str  # why no key can be a special token; empty if some can


@dataclass(frozen=True)
class BatchPart:
    """The texts of a running batch that an intervention changes."""

    texts: slice = field(default_factory=lambda: slice(None))  # the indices of these texts in the running batch
    source: slice | Tensor = field(default_factory=lambda: slice(None))
    """The indices of these texts among those for which the intervention's tensors were made."""

    def of(self, value: Tensor, texts: int) -> Tensor:
        """The values of this block in an intervention's tensor, which has one entry per text, or one for all texts."""
        chosen = value if len(value) == 1 else value[self.source]
        if len(chosen) not in (1, texts):
            raise InputError(
                f"its values are for {len(value)} texts, but the run has {texts}; give values for each text, or for a "
                f"single one."
            )
        return chosen


@dataclass(frozen=True)
class Block:
    """A block of rows of a layer's attention, in the texts that an intervention changes."""

    layer: int
    part: BatchPart
    queries: Batch
    keys: Batch
    rows: slice
    key_count: int  # the number of keys passed to the block


@public
@dataclass(frozen=True, eq=False)
class Values:
    """The tensors of an intervention, by layer, with a description such as "mean over 12 texts".

    At z and v a tensor is `[#batch #position head d_head]`, at pattern `[#batch head query key]`, at points of the
    stream `[#batch #position d_model]`; an axis marked `#` may have length 1. A vector `[d_head]` or `[d_model]` holds
    for all texts, positions and heads. At v, the axis may also be `kv_head`: heads that share keys then get the same
    values. Two `Values` are equal if their descriptions are equal, and their tensors are equal bit for bit, and their
    positions count alike.
    """

    by_layer: Mapping[int, Tensor]
    description: str = "given values"
    of_tokens: bool = False
    """Whether place p of the axis "position" is token p of each text, as in `am.mean_z(..., per_position=True)`; if
    not, it is column p of the run, padding included."""

    def __post_init__(self) -> None:
        by_layer = self.by_layer
        if (
            not isinstance(by_layer, Mapping)
            or not by_layer
            or not all(_is_layer(layer) and isinstance(value, torch.Tensor) for layer, value in by_layer.items())
        ):
            raise InputError(f"values must be tensors by layer, such as {{3: acts['z', 3]}}; got {_kind(by_layer)}.")
        for layer, value in by_layer.items():
            if dense(f"the values of layer {layer}", value).is_complex() or not bool(torch.isfinite(value).all()):
                raise InputError(
                    f"the values of layer {layer} must be finite real numbers; got {shown(value)}"
                    f"{'' if value.is_complex() else ' with NaN or infinity in it'}."
                )
            if not value.numel():
                raise InputError(f"the values of layer {layer} must not be empty; got a tensor {list(value.shape)}.")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tensors."""
        digest = hashlib.sha256()
        for layer, value in sorted(self.by_layer.items()):
            digest.update(f"{layer} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def by_position(self) -> bool:
        """Whether positions have values of their own, in any layer."""
        return any(value.ndim > 1 and value.shape[1] > 1 for value in self.by_layer.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values) or self.of_tokens != other.of_tokens:
            return False
        return self.description == other.description and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.description

    def fitted(
        self, layer: int, like: Tensor, part: BatchPart, *, positions: tuple[int, ...] = (1,), start: int = 0
    ) -> Tensor:
        """The tensor of a layer in the shape, precision and device of `like`; its axes `positions` run over tokens,
        the first of them from token `start`.
        """
        own = self.by_layer[layer]
        value = part.of(own.expand(*[1] * (like.ndim - 1), -1) if own.ndim == 1 else own, len(like)).to(like)
        for axis, first in zip(positions, (start, 0), strict=False):
            there, wanted = value.shape[axis], like.shape[axis]
            if there < first + wanted and (there > 1 or len(positions) > 1):
                raise InputError(f"its values are for {there} positions, but the text has {first + wanted}.")
            value = value.narrow(axis, min(first, there - 1), min(there, wanted))
        return value.expand(like.shape)

    def check(self, point: str, place: Place, *, per_query_head: bool = False) -> None:
        """Raises `InputError` if a layer of the place has no values, or if the shape of its values does not fit the
        point.

        With `per_query_head`, an axis of kv heads may have the length of the query heads instead.
        """
        axes, sizes = POINTS[point].axes, place.sizes
        shared = (sizes["kv_head"], sizes["head"]) if per_query_head else ()
        for layer in place.layers:
            if layer not in self.by_layer:
                raise InputError(f"there are values for layers {sorted(self.by_layer)}, but none for {layer}.")
            shape = self.by_layer[layer].shape
            fits = [*shape] == [sizes.get(axes[-1])] or (
                len(shape) == len(axes)
                and all(
                    size == sizes.get(axis, size) or (axis == "kv_head" and size in shared)
                    for axis, size in zip(axes, shape, strict=True)
                )
            )
            if not fits:
                wanted = " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
                raise InputError(f"its values must be [{wanted}]; those for layer {layer} are {[*shape]}.")


def checked_values(values: Any, layers: Iterable[int] | None = None) -> Values:
    """`Values`, made if necessary from tensors by layer, or from one tensor for each of `layers`."""
    if isinstance(values, Values):
        return values
    if isinstance(values, torch.Tensor) and layers is not None:
        return Values(dict.fromkeys(layers, values))
    return Values(dict(values) if isinstance(values, Mapping) else values)


def _is_layer(layer: object) -> bool:
    try:
        return integer(layer) >= 0
    except TypeError:
        return False


def _kind(values: object) -> str:
    """A short description of a wrong argument: printing tensors would be too long."""
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{key!r}: {type(value).__name__}" for key, value in values.items()) + "}"
    one = "; one tensor needs `layers=[3]`, or heads as a list" if isinstance(values, torch.Tensor) else ""
    return f"{type(values).__name__}{one}"
