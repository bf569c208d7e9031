"""beartype, for every function but those that return `Self`, which it takes only where it decorates the whole class."""

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
