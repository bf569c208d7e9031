"""A cache for tests: calls with the same meaning share an entry, however their arguments are written."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache`, but defaults and arguments by name count as the same call."""
    arguments, stored = signature(function), functools.cache(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        return stored(*bound.args, **bound.kwargs)

    return called
