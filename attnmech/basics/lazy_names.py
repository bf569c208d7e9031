"""Imports each public name of a module when it is first used.

The names come from the stub beside the module (`.pyi`), one import each; type checkers read the same file.

Public functions get signatures with their types as the source spells them. Python would expand type aliases: `Inputs`
alone takes 300 characters. The annotations of the function stay the same.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dis import opname
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from types import FrameType
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
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]


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


def from_stub(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a module, from its `__name__` and `__file__`."""
    path = Path(file)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    sources: dict[str, tuple[str, bool]] = {}
    for statement in ast.parse(path.with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            source = resolve_name("." * statement.level + (statement.module or ""), package)
            sources |= {alias.name: (source, statement.module is None) for alias in statement.names}

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
        source, is_module = sources[name]
        value = import_module(f"{source}.{name}") if is_module else readable(getattr(import_module(source), name))
        vars(sys.modules[module])[name] = value
        return value

    return load, lambda: sorted(sources), sorted(sources)


def is_from_import() -> bool:
    """Whether the package's `__getattr__`, which calls this, answers `from attnmech import name`.

    Python drops the message of an `AttributeError` that is raised during a `from` import.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "attnmech"):
        frame = frame.f_back
    return frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
