"""How does the signature of a public function read? Types as they are written in its source, one argument a line.

Python prints a type alias as all that it stands for: `Inputs` alone is 300 characters. Only the text is changed;
the annotations of a signature, and of the function, stay what they are.
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
    """A parameter whose text has its type as the source has it."""

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
        """A plain parameter with these changes."""
        plain = inspect.Parameter(self.name, self.kind, default=self.default, annotation=self.annotation)
        return plain.replace(**changes)


class WrittenSignature(inspect.Signature):
    """A signature that prints one argument a line, where it does not fit one line."""

    __slots__ = ("_written",)

    def __init__(self, signature: inspect.Signature, written: dict[str, str]) -> None:
        parameters = [WrittenParameter(each, written.get(each.name, "")) for each in signature.parameters.values()]
        super().__init__(parameters, return_annotation=signature.return_annotation)
        self._written = written

    def replace(self, **changes: Any) -> "WrittenSignature":
        """The signature with other parameters, such as those of a bound method, which leave out `self`."""
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
    """Gives a function the signature that it has in its source; the same function."""
    if "__signature__" not in vars(function):
        plain = inspect.signature(function)
        function.__signature__ = WrittenSignature(plain, _annotations(inspect.unwrap(function)))  # type: ignore[attr-defined]
    return function


@cache
def readable(thing: Any) -> Any:
    """A public function, or a class with its public methods, under signatures that can be read; the same object."""
    if inspect.isfunction(thing):
        as_written(thing)
    elif inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.startswith("attnmech."):
                for name, each in vars(kind).items():
                    function = each.__func__ if isinstance(each, classmethod | staticmethod) else each
                    if not name.startswith("_") and inspect.isfunction(function):
                        as_written(function)
    return thing


def _with_marks(parameters: list[inspect.Parameter]) -> list[str]:
    """The parameters as text, with the star after which all are named."""
    parts: list[str] = []
    named = False
    for each in parameters:
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named |= each.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        parts.append(str(each))
    return parts


@cache
def _annotations(function: Callable[..., Any]) -> dict[str, str]:
    """The types in a function's source, by the argument's name; empty where there is no source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return {}
    if not isinstance(node, ast.FunctionDef):
        return {}
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    found = {each.arg: _text(each.annotation) for each in every if each is not None and each.annotation is not None}
    return {**found, "return": _text(node.returns)} if node.returns is not None else found


def _text(annotation: ast.expr) -> str:
    """A type without the quotes of a forward reference, and without typing's word for shared options."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack":
        return ast.unparse(annotation.slice)
    return ast.unparse(annotation)
