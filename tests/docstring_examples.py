"""Runs the example in the docstring of a public call: the one declaration of its arguments.

The reference draws the figures of the results, the matrix of calls makes new calls on every family, and the fuzz of
files damages what each result saves.
"""

import contextlib
import doctest
import inspect
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import attnmech as am


class Made(NamedTuple):
    code: str
    """The statement that assigns it."""
    name: str
    """The variable in the example."""
    result: Any


def run(call: Callable[..., Any]) -> Iterator[Made]:
    """Runs the example of a call, without the lines that doctest skips; yields each result that a line assigns."""
    names: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(call) or ""):
        if doctest.SKIP in example.options:
            continue
        before = dict(names)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(example.source, call.__name__, "exec"), names)
        for name, value in names.items():
            if before.get(name) is not value and getattr(am.results, type(value).__name__, None) is type(value):
                yield Made(example.source.rstrip(), name, value)


@cache
def made() -> dict[str, Made]:
    first: dict[str, Made] = {}
    for name in am.__all__:
        if inspect.isfunction(call := getattr(am, name)):
            for one in run(call):
                first.setdefault(type(one.result).__name__, one)
    return first
