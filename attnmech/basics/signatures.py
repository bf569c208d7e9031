"""Gives public functions signatures with their types as the source spells them.

Python would expand type aliases: `Inputs` alone takes 300 characters. The annotations of the function stay the same.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


class Written:
    """A type that prints as the source writes it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@cache
def readable(thing: Any) -> Any:
    """Gives a public function, or the public methods of a class, readable signatures, and returns the same object."""
    if inspect.isfunction(thing):
        _rewrite(thing)
    elif inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.startswith("attnmech."):
                for name, member in vars(kind).items():
                    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                    if not name.startswith("_") and inspect.isfunction(function):
                        _rewrite(function)
    return thing


def _rewrite(function: Callable[..., Any]) -> None:
    if "__signature__" in vars(function):
        return
    plain, types = inspect.signature(function), _types(inspect.unwrap(function))
    parameters = [
        parameter.replace(annotation=types.get(parameter.name, parameter.annotation))
        for parameter in plain.parameters.values()
    ]
    returns = types.get("return", plain.return_annotation)
    signature = inspect.Signature(parameters, return_annotation=returns)
    function.__signature__ = signature  # type: ignore[attr-defined]


def _types(function: Callable[..., Any]) -> dict[str, Written]:
    """The types in a function's source, by argument; empty if there is no source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return {}
    if not isinstance(node, ast.FunctionDef):
        return {}
    arguments = {argument.arg: argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    types = {**arguments, "return": node.returns}
    return {name: Written(_text(annotation)) for name, annotation in types.items() if annotation is not None}


def _text(annotation: ast.expr) -> str:
    """A type without the quotes of a forward reference and without `Unpack`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack":
        return ast.unparse(annotation.slice)
    return ast.unparse(annotation)
