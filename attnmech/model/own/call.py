"""Converts the arguments of a user's module to tensors with one row per text, and back.

The form of a call is that of `example`: a tensor, a tuple of positional arguments or a mapping of keyword arguments,
which may hold lists, tuples and mappings. The batch axis of each tensor is found by running the example twice in one
batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...basics.arguments import shown
from ...errors import InputError
from ...maths.float64 import as_float64
from ..attention.replaced_mha import padded_of

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

_LENGTHS: Final = " lengths"  # the suffix that turns the name of a nested tensor into the name of its texts' lengths
_SEED: Final = 53
_TRIES: Final = 256  # at most this many assignments of batch axes are tried


@dataclass(frozen=True)
class Axis:
    """The batch axis of one tensor of a call."""

    kind: str  # "batch" at `at`; "new" if the axis is inserted; "shared" by all texts; "nested", one tensor per text
    at: int = 0
    per_text: int = 1  # the number of entries of the axis per text (a mask [texts · heads, query, key] has several)


@dataclass(frozen=True)
class CallForm:
    """The form of a call: its arguments, which of them are tensors, and the batch axis of each tensor."""

    names: tuple[str, ...]
    spec: Any  # torch's description of the structure of the arguments
    fixed: Mapping[str, Any]  # the arguments that are not tensors, as in the example
    axes: Mapping[str, Axis]
    same: Mapping[str, str]  # maps each argument that is the same tensor as an earlier one (say a key) to that one

    @classmethod
    def of(cls, example: Any) -> "CallForm":
        """The form of an example before batch axes are known: every tensor counts as shared by all texts."""
        names, leaves, spec = _flat(example)
        arguments = dict(zip(names, leaves, strict=True))
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        first = {id(value): name for name, value in reversed(tensors.items())}
        same = {name: first[id(value)] for name, value in tensors.items() if first[id(value)] != name}
        if not tensors:
            raise InputError(
                "`example` must hold what the module is called with: a tensor, a tuple of arguments or a mapping of "
                f"keyword arguments; got {shown(example)}."
            )
        fixed = {name: value for name, value in arguments.items() if name not in tensors}
        own = {name: value for name, value in tensors.items() if name not in same}
        axes = {name: Axis("nested" if value.is_nested else "shared") for name, value in own.items()}
        return cls(names, spec, fixed, axes, same)

    def tensors(self, inputs: Any) -> dict[str, Tensor]:
        """The tensors of inputs in this form, by name; raises `InputError` for inputs of another form."""
        names, leaves, _ = _flat(inputs)
        arguments = dict(zip(names, leaves, strict=True))
        if set(names) != set(self.names):
            raise InputError(f"this module is called with {_listed(self.names)}; got {_listed(names)}.")
        for name, value in self.fixed.items():
            if not _same(arguments[name], value):
                raise InputError(
                    f"argument {name!r} was {shown(value)} in `example`, and only that was proven; got "
                    f"{shown(arguments[name])}. Load the module again with an example of this kind."
                )
        for name, other in self.same.items():
            if arguments[name] is not arguments[other]:
                raise InputError(
                    f"arguments {name!r} and {other!r} were one tensor in `example`, and only that was proven; here "
                    f"they are two. Load the module again with an example of this kind."
                )
        tensors = {}
        for name in self.axes:
            if not isinstance(arguments[name], torch.Tensor):
                raise InputError(f"argument {name!r} must be a tensor, as in `example`; got {shown(arguments[name])}.")
            tensors[name] = arguments[name]
        return tensors

    def rows(self, inputs: Any) -> dict[str, Tensor]:
        """The tensors with texts as their first axis, one row per text; a single row for all that texts share."""
        rows: dict[str, Tensor] = {}
        for name, value in self.tensors(inputs).items():
            axis = self.axes[name]
            if value.is_nested != (axis.kind == "nested"):
                raise InputError(
                    f"argument {name!r} was {'' if value.is_nested else 'not '}a dense tensor in `example`."
                )
            if axis.kind == "nested":
                padded, hidden = padded_of(value)
                rows |= {name: padded, name + _LENGTHS: (~hidden).sum(dim=1)}
            elif axis.kind == "batch":
                rows[name] = _by_text(name, value, axis)
            else:
                rows[name] = value[None]
        sizes = {name: len(value) for name, value in rows.items() if self.axes.get(name, _SHARED).kind == "batch"}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
            raise InputError(f"all inputs must have the same number of texts; {listed}.")
        if 0 in sizes.values():
            raise InputError("the batch has no text; give at least one.")
        return rows

    def texts(self, rows: Mapping[str, Tensor]) -> int:
        return max((len(value) for name, value in rows.items()), default=1)

    def arguments(self, rows: Mapping[str, Tensor]) -> Arguments:
        """The arguments of the module, built from the tensors that `rows` returned."""
        arguments = {name: self._argument(name, rows) for name in self.axes}
        leaves = [
            self.fixed[name] if name in self.fixed else arguments[self.same.get(name, name)] for name in self.names
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def width(self, rows: Mapping[str, Tensor]) -> int | None:
        """The padded length of nested tensors, whichever texts are selected; None without nested tensors."""
        lengths = [rows[name].shape[1] for name, axis in self.axes.items() if axis.kind == "nested"]
        return max(lengths, default=None)

    def _argument(self, name: str, rows: Mapping[str, Tensor]) -> Tensor:
        axis, value = self.axes[name], rows[name]
        if axis.kind == "nested":
            lengths = rows[name + _LENGTHS].tolist()
            return torch.nested.as_nested_tensor([row[:length] for row, length in zip(value, lengths, strict=True)])
        if axis.kind == "shared":
            return value[0]
        return (value.flatten(0, 1) if axis.per_text > 1 else value).movedim(0, axis.at)

    def is_by_text(self, name: str) -> bool:
        """Whether a tensor of `rows` has a row for each text."""
        axis = self.axes.get(name)
        return axis is None or axis.kind != "shared"

    def perturbed(self, rows: Mapping[str, Tensor], texts: int = 2) -> dict[str, Tensor]:
        """The first texts, and the same with noise on real numbers: an example of zeros alone would prove nothing."""
        generator = torch.Generator().manual_seed(_SEED)
        both = {}
        for name, value in rows.items():
            if not self.is_by_text(name):
                both[name] = value
                continue
            first = other = value[:texts]
            if first.is_floating_point() and not _is_mask(first):
                spread = float(as_float64(first).std()) if first.numel() > 1 else 0.0
                other = first + (spread or 1.0) / 2 * torch.randn(first.shape, generator=generator).to(first)
            both[name] = torch.cat((first, other))
        return both

    def __deepcopy__(self, memo: object) -> "CallForm":
        return self

    def candidates(self, tensors: Mapping[str, Tensor], texts: int, *, batched: bool) -> Iterator["CallForm"]:
        """The assignments of batch axes that the sizes allow, the most usual first."""
        choices: list[list[Axis]] = []
        for value in tensors.values():
            if value.is_nested:
                choices.append([Axis("nested")])
                continue
            if batched:
                axes_of_size = [Axis("batch", at) for at in range(value.ndim) if value.shape[at] == texts]
                if value.ndim > 2 and value.shape[0] > texts and value.shape[0] % texts == 0:
                    axes_of_size.append(Axis("batch", 0, value.shape[0] // texts))
            else:
                axes_of_size = [Axis("new", at) for at in range(min(2, value.ndim + 1))]
            choices.append([*axes_of_size, _SHARED])
        for axes in islice(product(*choices), _TRIES):
            if any(axis.kind != "shared" for axis in axes):
                yield replace(self, axes=dict(zip(tensors, axes, strict=True)))


_SHARED: Final = Axis("shared")


def _flat(inputs: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    arguments: Arguments = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    if isinstance(inputs, tuple):
        arguments = (inputs, {})
    paths, spec = pytree.tree_flatten_with_path(arguments)
    names = tuple(".".join(str(_key(key)) for key in path[1:]) for path, _ in paths)
    leaves = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for _, value in paths]
    return names, leaves, spec


def _by_text(name: str, value: Tensor, axis: Axis) -> Tensor:
    if value.ndim <= axis.at or value.shape[axis.at] % axis.per_text:
        raise InputError(f"argument {name!r} had its texts along axis {axis.at} in `example`; got {list(value.shape)}.")
    first = value.movedim(axis.at, 0)
    return first.reshape(-1, axis.per_text, *first.shape[1:]) if axis.per_text > 1 else first


def _is_mask(value: Tensor) -> bool:
    """Whether a tensor of real numbers may be a mask: it holds −∞, or only 0 and 1."""
    return bool(value.isinf().any()) or (bool(((value == 0) | (value == 1)).all()) and bool(value.any()))


def _key(entry: Any) -> object:
    return entry.idx if hasattr(entry, "idx") else getattr(entry, "key", entry)


def _same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # the user's class may define == in any way
        return one is other


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"argument {name}" if name.isdigit() else repr(name) for name in names)
