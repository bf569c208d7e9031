"""Prints signatures of public functions with their types as the source spells them, one argument per line.

Python would expand type aliases: `Inputs` alone takes 300 characters. Only the printed text changes; the annotations of
the signature and of the function stay the same.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_WIDTH: Final = 88
_STARS: Final = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


class WrittenParameter(inspect.Parameter):
    """A parameter that prints its type as the source writes it."""

    __slots__ = ("_written",)

    def __init__(self, parameter: inspect.Parameter, written: str) -> None:
        super().__init__(parameter.name, parameter.kind, default=parameter.default, annotation=parameter.annotation)
        self._written = written

    def __str__(self) -> str:
        if not self._written:
            return str(self.replace(annotation=inspect.Parameter.empty))
        default = "" if self.default is inspect.Parameter.empty else f" = {self.default!r}"
        stars = _STARS.get(self.kind.name, "")
        return f"{stars}{self.name}: {self._written}{default}"

    def replace(self, **changes: Any) -> inspect.Parameter:  # type: ignore[override]
        """An `inspect.Parameter` with these changes."""
        plain = inspect.Parameter(self.name, self.kind, default=self.default, annotation=self.annotation)
        return plain.replace(**changes)


class WrittenSignature(inspect.Signature):
    """A signature that prints one argument per line if it does not fit on one line."""

    __slots__ = ("_written",)

    def __init__(self, signature: inspect.Signature, written: dict[str, str]) -> None:
        parameters = [
            WrittenParameter(parameter, written.get(parameter.name, "")) for parameter in signature.parameters.values()
        ]
        super().__init__(parameters, return_annotation=signature.return_annotation)
        self._written = written

    def replace(self, **changes: Any) -> "WrittenSignature":
        """The signature with other parameters, such as those of a bound method without `self`."""
        plain = inspect.Signature(list(self.parameters.values()), return_annotation=self.return_annotation)
        return WrittenSignature(plain.replace(**changes), self._written)

    def __str__(self) -> str:
        parts = _with_marks(list(self.parameters.values()))
        returns = f" -> {self._written['return']}" if "return" in self._written else ""
        line = f"({', '.join(parts)}){returns}"
        if len(line) <= _WIDTH:
            return line
        return "\n".join(["(", *(f"    {part}," for part in parts), f"){returns}"])


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the signature that its source spells, and returns the function."""
    if "__signature__" not in vars(function):
        plain = inspect.signature(function)
        function.__signature__ = WrittenSignature(plain, _annotations(inspect.unwrap(function)))  # type: ignore[attr-defined]
    return function


@cache
def readable(thing: Any) -> Any:
    """Gives a public function, or the public methods of a class, readable signatures, and returns the same object."""
    if inspect.isfunction(thing):
        as_written(thing)
    elif inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.startswith("attnmech."):
                for name, member in vars(kind).items():
                    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                    if not name.startswith("_") and inspect.isfunction(function):
                        as_written(function)
    return thing


def _with_marks(parameters: list[inspect.Parameter]) -> list[str]:
    """The parameters as text, with the star that precedes the keyword-only ones."""
    parts: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred |= parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        parts.append(str(parameter))
    return parts


@cache
def _annotations(function: Callable[..., Any]) -> dict[str, str]:
    """The types in a function's source, by argument; empty if there is no source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return {}
    if not isinstance(node, ast.FunctionDef):
        return {}
    signature = node.args
    arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
    types = {
        argument.arg: _text(argument.annotation)
        for argument in arguments
        if argument is not None and argument.annotation is not None
    }
    return {**types, "return": _text(node.returns)} if node.returns is not None else types


def _text(annotation: ast.expr) -> str:
    """A type without the quotes of a forward reference and without `Unpack`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack":
        return ast.unparse(annotation.slice)
    return ast.unparse(annotation)
