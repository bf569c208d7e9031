"""Checks callers' arguments: each function returns a valid argument, or raises `InputError` with its name and value.

>>> whole_number("steps", 3, least=1), finite_number("memory", 0.5, above=0.0)
(3, 0.5)
"""

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

_LONGEST: Final = 80  # messages quote at most this many characters of a value


def flag(name: str, value: object) -> bool:
    """True or False; any other value raises, even 0 and 1.

    >>> flag("truncate", True)
    True
    """
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False; got {shown(value)}.")
    return value


def optional_flag(name: str, value: object) -> bool | None:
    """True, False, or None for the default.

    >>> optional_flag("bos", None)
    """
    if value is not None and not isinstance(value, bool):
        raise InputError(f"`{name}` must be True, False or None; got {shown(value)}.")
    return value


def integer(value: Any) -> int:
    """Converts a whole number of any library's type to an int; raises `TypeError` for anything else, bools included.

    >>> integer(3)
    3
    """
    # Python's and torch's bools pass as ints; numpy's do not.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError(f"expected an int; got {value!r}")
    try:
        return operator.index(value)
    except RuntimeError as error:  # torch's, for a tensor without data
        raise TypeError(str(error)) from error


def _whole(value: object) -> int | None:
    try:
        return integer(value)
    except TypeError:
        return None


def index_of(name: str, value: object, count: int, owner: str = "") -> int:
    """An index from 0 to count − 1, of any integer type; raises `InputError` for anything else.

    >>> index_of("head", 3, 8)
    3
    """
    index = _whole(value)
    if index is None or not 0 <= index < count:
        known = f" ({owner})" if owner else ""
        raise InputError(f"`{name}` must be from 0 to {count - 1}{known}; got {value!r}.")
    return index


def whole_number(name: str, value: object, *, least: int = 0, most: int | None = None, most_is: str = "") -> int:
    """A whole number in a range, of any integer type; `most_is` says in the message what the upper limit is.

    >>> whole_number("count", 7, most=7)
    7
    """
    number = _whole(value)
    if number is not None and number >= least and (most is None or number <= most):
        return number
    upper = " or more" if most is None else f" to {most}"
    explained = f" ({most_is})" if most_is else ""
    raise InputError(f"`{name}` must be a whole number, {least}{upper}{explained}; got {shown(value)}.")


def member(name: str, value: object, known: Sequence[int], they_are: str) -> int:
    """One of the `known` whole numbers, such as a measured layer; the message calls them `they_are`.

    >>> member("layer", 3, (0, 3), "the layers measured")
    3
    """
    number = _whole(value)
    if number is not None and number in known:
        return number
    raise InputError(f"`{name}` must be one of {they_are}, {list(known)}; got {shown(value)}.")


def pairs_of(name: str, value: Any, wanted: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers, in their order, without duplicates; the message says that the argument must be `wanted`.

    >>> pairs_of("heads", [(3, 1), (0, 2), (3, 1)], "a list of (layer, head)")
    [(3, 1), (0, 2)]
    """
    try:
        pairs = [(integer(first), integer(second)) for first, second in value]
    except (TypeError, ValueError):
        raise InputError(f"`{name}` must be {wanted}; got {shown(value)}.") from None
    return list(dict.fromkeys(pairs))


def option(name: str, value: object, known: Iterable[str]) -> str:
    """One of the `known` strings.

    >>> option("side", "query", ("query", "target"))
    'query'
    """
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise InputError(f"`{name}` must be one of {', '.join(known)}; got {shown(value)}.")
    return value


def finite_number(name: str, value: object, *, above: float = -math.inf, below: float = math.inf) -> float:
    """A finite number strictly between two bounds.

    >>> finite_number("level", 0.95, above=0.0, below=1.0)
    0.95
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and above < number < below:
            return number
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
    wanted = f" {' and '.join(bounds)}" if bounds else ""
    raise InputError(f"`{name}` must be a finite number{wanted}; got {shown(value)}.")


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """The items of any iterable but a string, as a list; the message says that the argument must be `wanted`.

    >>> listed("layers", (0, 2), "a list of ints")
    [0, 2]
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InputError(f"`{name}` must be {wanted}; got {shown(value)}.")
    try:
        return list(value)
    except TypeError:  # zero-dimensional arrays claim to be iterable
        raise InputError(f"`{name}` must be {wanted}; got {shown(value)}.") from None


def strings(name: str, value: Any) -> list[str]:
    """The strings of a list.

    >>> strings("tokens", ["Anna", " sang"])
    ['Anna', ' sang']
    """
    return [string(name, item, "hold only strings") for item in listed(name, value, "a list of strings")]


def string(name: str, value: object, wanted: str = "be a string") -> str:
    """A string.

    >>> string("title", "Attention")
    'Attention'
    """
    if not isinstance(value, str):
        raise InputError(f"`{name}` must {wanted}; got {shown(value)}.")
    return value


def dense(name: str, value: Tensor) -> Tensor:
    """A tensor of readable numbers: not sparse, nested, quantised, or on the meta device.

    >>> dense("token ids", torch.tensor([5, 7]))
    tensor([5, 7])
    """
    if value.is_meta:
        raise InputError(f"{name} must hold numbers; got a tensor on the meta device, which has none.")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantised" if value.is_quantized else "sparse"
        remedy = "dequantize" if value.is_quantized else "to_padded_tensor" if value.is_nested else "to_dense"
        raise InputError(f"{name} must be a dense tensor; got a {kind} one. Try .{remedy}().")
    return value


def shown(value: object) -> str:
    """Shows a value on one short line of a message; a tensor or an array is shown by its type and shape.

    >>> shown("yes"), shown(torch.zeros(2, 3))
    ("'yes'", 'a Tensor of torch.float32 [2, 3]')
    """
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return f"a {type(value).__name__} of {value.dtype} [{', '.join(map(str, value.shape))}]"
    try:
        line = " ".join(repr(value).split())
    except Exception:  # repr may run any code
        return f"a {type(value).__name__}"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}… ({type(value).__name__})"
