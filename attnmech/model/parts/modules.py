"""Finds modules of a model by their dotted paths."""

from torch import nn

from ...errors import UnsupportedModelError


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at a dotted path."""
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
