"""Imports each public name of a module when it is first used.

The names come from the stub beside the module (`.pyi`), one import each; type checkers read the same file.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dis import opname
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from types import FrameType
from typing import Any

from .signatures import readable


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
