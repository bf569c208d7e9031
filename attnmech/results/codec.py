"""Turns a result into tensors and JSON values and back, field by field, so that no class needs its own code.

A tensor is stored under its path, such as `effects.zero_value.after`, and everything else at the same kind of path in a
JSON object.
"""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor


def packed(thing: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a dataclass by path, and the rest as JSON values.

    Omits fields whose metadata says so (`saved`), and the provenance, which is stored once for the whole result.

    >>> @dataclasses.dataclass
    ... class Example:
    ...     layers: tuple[int, ...]
    ...     effect: Tensor
    >>> import torch
    >>> packed(Example((0, 3), torch.ones(1)))
    ({'effect': tensor([1.])}, {'layers': [0, 3], 'effect': None})
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return None
        if dataclasses.is_dataclass(value):
            return {name: plain(getattr(value, name), f"{path}.{name}") for name in _saved(value)}
        if isinstance(value, Mapping):
            return {name: plain(entry, f"{path}.{name}") for name, entry in value.items()}
        if isinstance(value, tuple | list):
            return [plain(entry, f"{path}.{place}") for place, entry in enumerate(value)]
        return value

    return tensors, {name: plain(getattr(thing, name), name) for name in _saved(thing)}


def unpacked(kind: type[Any], tensors: Mapping[str, Tensor], rest: Mapping[str, Any], **shared: Any) -> Any:
    """Rebuilds the dataclass from what `packed` returned; `shared` are the fields that `packed` omitted.

    Raises `KeyError` with the name of a missing field, and `ValueError` for a field of the wrong shape.
    """
    return _Reader(tensors, shared).thing(kind, rest, "")


class _Reader:
    def __init__(self, tensors: Mapping[str, Tensor], shared: Mapping[str, Any]) -> None:
        self._tensors, self._shared = tensors, shared

    def thing(self, kind: type[Any], rest: Any, before: str) -> Any:
        """The dataclass that is stored under a path."""
        if not isinstance(rest, Mapping):
            raise ValueError(f"`{before or kind.__name__}` must be an object")
        hints, values = get_type_hints(kind), {}
        for field in dataclasses.fields(kind):
            path = f"{before}.{field.name}" if before else field.name
            if field.name in self._shared:
                values[field.name] = self._shared[field.name]
            elif not _is_saved(field):
                continue
            elif field.name in rest or path in self._tensors or type(None) in get_args(hints[field.name]):
                values[field.name] = self._value(hints[field.name], rest.get(field.name), path)
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise KeyError(field.name)
        return kind(**values)

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            if path in self._tensors or value is None:
                return self._tensors.get(path)
            return self._value(_member(inner, value), value, path)
        if _is_tensor(hint):
            return self._tensors[path]
        if dataclasses.is_dataclass(hint):
            return self.thing(hint, value, path)  # type: ignore[arg-type]
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            key = int if inner[0] is int else str
            return {key(name): self._value(inner[1], entry, f"{path}.{name}") for name, entry in value.items()}
        if origin is tuple and isinstance(value, list):
            hints = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
            return tuple(
                self._value(entry_hint, entry, f"{path}.{place}")
                for place, (entry_hint, entry) in enumerate(zip(hints, value, strict=True))
            )
        return value


def _is_saved(field: "dataclasses.Field[Any]") -> bool:
    return field.name != "provenance" and bool(field.metadata.get("saved", True))


def _saved(thing: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(thing) if _is_saved(field)]


def _member(hints: tuple[Any, ...], value: Any) -> Any:
    """The member of a union type from which a JSON value was written."""

    def fits(hint: Any) -> bool:
        if isinstance(value, list):
            return get_origin(hint) is tuple
        if isinstance(value, Mapping):
            return dataclasses.is_dataclass(hint)
        return not dataclasses.is_dataclass(hint) and get_origin(hint) is not tuple

    return next((hint for hint in hints if hint is not NoneType and fits(hint)), Any)


def _is_tensor(hint: Any) -> bool:
    return hint is Tensor or hasattr(hint, "dim_str")
