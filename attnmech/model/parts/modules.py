"""Finds modules by their dotted paths, and the stream among the arguments and outputs of a module."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError


def has_module(root: nn.Module, path: str) -> bool:
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path; raises `UnsupportedModelError` if there is none, unlike in the model's family."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"expected {type(root).__name__} to hold a module at {path!r}, as its family does; it has none. "
            "The model has been rebuilt or wrapped: load it as its own class."
        ) from error


KEY_STATES: Final = ("key_value_states", "encoder_hidden_states")
"""The arguments of transformers' attention modules from which cross-attention makes keys and values."""


def first_tensor(output: Any) -> Tensor:
    """The tensor that a block or an attention module returns, by itself or first in a tuple."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def stream_of(args: Any, kwargs: Any) -> Tensor:
    stream = args[0] if args else kwargs[_stream_name(kwargs)]
    assert isinstance(stream, torch.Tensor)
    return stream


def with_stream(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _stream_name(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def with_first(output: Any, first: Tensor) -> Any:
    return first if isinstance(output, torch.Tensor) else (first, *output[1:])


def _stream_name(kwargs: Any) -> str:
    """The argument that is the stream: transformers' name, or the first tensor of a block of another kind."""
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(str(name) for name, value in kwargs.items() if isinstance(value, torch.Tensor))
