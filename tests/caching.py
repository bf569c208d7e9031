"""A cache for tests, whose key is the meaning of a call, not how its arguments are written."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache`, for which a default that is given, or an argument by its name, is the same call."""
    arguments, stored = signature(function), functools.cache(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        return stored(*bound.args, **bound.kwargs)

    return called
