"""Checks the fields of a dataclass against their annotations; axes with the same name must have the same length.

Results that are read from files are checked here once, so later code can rely on them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import torch
from jaxtyping import Shaped, jaxtyped
from torch import Tensor

from .arguments import shown

_PLAIN: Final[Mapping[Any, type | tuple[type, ...]]] = {float: (float, int), int: int, bool: bool, str: str}
"""The types that JSON has; a whole number passes as a float."""


def check_fields(thing: Any, lengths: Mapping[str, int]) -> None:
    """Raises `ValueError`, naming the first field that does not fit its annotation; checks nested fields too.

    `lengths` gives the lengths of labelled axes, such as `layer`; all axes with the same name must have the same
    length.

    >>> @dataclasses.dataclass
    ... class Effects:
    ...     layers: tuple[int, ...]
    ...     effect: Shaped[Tensor, "layer head"]
    >>> check_fields(Effects((0, 3), torch.zeros(2, 8)), {"layer": 2})
    >>> check_fields(Effects((0, 3), torch.zeros(3, 8)), {"layer": 2})     # doctest: +SKIP
    Traceback (most recent call last):
    ValueError: `effect` must be Shaped[Tensor, 'layer head'] with layer=2; got a Tensor of torch.float32 [3, 8]
    """
    hints = get_type_hints(type(thing))
    values = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    _check({name: (value, hints[name]) for name, value in values.items()}, lengths)


def check_entries(name: str, entries: Mapping[str, Any], hints: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    """Does what `check_fields` does, for those entries of a mapping that have a type hint."""
    _check({f"{name}[{key!r}]": (entries[key], hint) for key, hint in hints.items() if key in entries}, lengths)


def _check(pairs: Mapping[str, tuple[Any, Any]], lengths: Mapping[str, int]) -> None:
    """Checks all values against their annotations in one context, in which a named axis has one length."""
    with jaxtyped("context"):
        for axis, length in lengths.items():
            of_axis: Any = Shaped[Tensor, f" {axis}"]
            isinstance(torch.empty(length), of_axis)  # binds the axis to this length in this context
        for name, (value, hint) in pairs.items():
            if not _fits(value, hint, lengths):
                known = ", ".join(f"{axis}={length}" for axis, length in lengths.items())
                where = f" with {known}" if known and _is_tensor(hint) else ""
                raise ValueError(f"`{name}` must be {_named(hint)}{where}; got {shown(value)}")


def check_rows(name: str, rows: Sequence[Sequence[str]], count: int, length: int | None = None) -> None:
    """Raises `ValueError` unless there are `count` rows, each with `length` entries (any number if `length` is None).

    >>> check_rows("tokens", (("Anna", " sang"),), count=1, length=2)
    """
    if len(rows) != count:
        raise ValueError(f"`{name}` must have {count} rows; got {len(rows)}")
    for row in rows:
        if length is not None and len(row) != length:
            raise ValueError(f"the rows of `{name}` must have {length} entries; got a row of {len(row)}")


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raises `ValueError` if a layer is not below `count`, or is repeated.

    >>> check_layers((0, 3), 4)
    """
    if not layers or len(set(layers)) < len(layers) or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"`layers` must name some of the {count} layers, each once; got {shown(list(layers))}")


def _fits(value: Any, hint: Any, lengths: Mapping[str, int]) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, member, lengths) for member in inner)
    if origin is Literal:
        return value in inner
    if hint in _PLAIN:
        known = isinstance(value, _PLAIN[hint]) and isinstance(value, bool) == (hint is bool)
        return known and (hint is not float or math.isfinite(value))
    if origin is tuple:
        if inner[-1] is not Ellipsis:
            return (
                isinstance(value, tuple)
                and len(value) == len(inner)
                and all(_fits(item, item_hint, lengths) for item, item_hint in zip(value, inner, strict=True))
            )
        return isinstance(value, tuple) and all(_fits(item, inner[0], lengths) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, origin) and all(
            _fits(key, inner[0], lengths) and _fits(entry, inner[1], lengths) for key, entry in value.items()
        )
    if not isinstance(value, hint):
        return False
    if dataclasses.is_dataclass(value):
        check_fields(value, {**lengths, **getattr(value, "_axis_lengths", {})})
    return True


def _is_tensor(hint: Any) -> bool:
    return any(hasattr(member, "dim_str") for member in (hint, *get_args(hint)))


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
