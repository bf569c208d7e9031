"""Is a function the same as before? A digest of what it is made of, the same in every process.

What counts is the compiled code (not its location), the defaults, what the closure holds, and the values of the
globals that the code names, recursively: numbers and tensors by content, functions by their code, objects by their
class and attributes. Functions and classes of installed packages count by name and version. Objects that hide their
content (a generator, an open file) count only by type.
"""

import dis
import functools
import hashlib
import os
import site
import struct
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ..model.parts.weights import tensors_hash
from ..model.run.hooked import HookedModel

_FOLDERS: Final[tuple[str | Path, ...]] = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    Path(__file__).parents[1],
)
_INSTALLED: Final = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (Path(folder), Path(folder).resolve()))
"""The folders of code whose version says what it does."""

_NOT_BEHAVIOUR: Final = frozenset(
    ("__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__",
     "__firstlineno__", "__module__", "__qualname__", "__signature__", "__slotnames__", "__static_attributes__",
     "__weakref__", "_abc_impl")
)  # fmt: skip
"""Entries of a class or a function that do not say what it does; `copyreg` leaves some behind."""


Parts: TypeAlias = list[str | bytes]


def digest_of(value: object) -> str:
    """The first 16 hex digits of the SHA-256 of what a function, a class or an object is made of.

    >>> def scaled(by):
    ...     return lambda logits, batch: by * logits[:, -1, 0]
    >>> digest_of(scaled(2.0)) == digest_of(scaled(2.0)), digest_of(scaled(2.0)) == digest_of(scaled(3.0))
    (True, False)
    """
    return _Digests().of(value).hex()[:16]


def identity_of(model: HookedModel, weights: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run must share with a journal to resume from it: version, model, hooks, and `rest`.

    `weights` is the model's `weights_hash`, which takes a while to compute.
    """
    return {
        "attnmech": version("attnmech"),
        "model": model.name,
        "weights": weights,
        "hooks": list(model.edited),
        "code and values of the hooks": hooks_digests(model),
        **rest,
    }


def hooks_digests(model: HookedModel) -> list[list[Any]]:
    """What is active on a model, in order: each hook's point with the digest of its function; interventions."""
    hooks = [[name, layer, digest_of(edit)] for (name, layer), edit in model.edit_functions]
    return [*hooks, *([each.digest] for each in model.interventions)]


class _Digests:
    """One walk through values that may refer to each other."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bytes]] = {}
        """By id; with the object itself, so that no other can get its id."""
        self._under_way: list[int] = []

    def of(self, value: object) -> bytes:
        """The digest of anything."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return _hash(_name_of(type(value)), _text(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._under_way:
            return _hash("again", str(len(self._under_way) - self._under_way.index(id(value))))
        self._under_way.append(id(value))
        try:
            found = _hash(*self._parts(value))
        finally:
            self._under_way.pop()
        self._known[id(value)] = value, found
        return found

    def _all(self, values: Iterable[object]) -> list[str | bytes]:
        return [self.of(value) for value in values]

    def _parts(self, value: Any) -> Parts:
        """What a value is made of, its kind first."""
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
            return ["tensor", tensors_hash({"": value})]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ["array", value.dtype.str, str(value.shape), np.ascontiguousarray(value).tobytes()]
        if isinstance(value, HookedModel):
            return ["model", value.name, value.weights_hash]
        if type(value) in (list, tuple):
            return [type(value).__name__, *self._all(value)]
        if type(value) in (set, frozenset):
            return [type(value).__name__, *sorted(self.of(each) for each in value)]
        if type(value) in (dict, types.MappingProxyType):
            return ["mapping", *self._pairs(value)]
        return self._code_of(value) or list(self._object(value))

    def _code_of(self, value: Any) -> Parts:
        """The same for code; empty for other values."""
        match value:
            case types.CodeType():
                return list(self._code(value))
            case types.FunctionType():
                return list(self._function(value))
            case types.MethodType():
                return ["method", self.of(value.__func__), self.of(value.__self__)]
            case types.BuiltinFunctionType():
                held = None if isinstance(value.__self__, types.ModuleType) else value.__self__
                return ["builtin", _name_of(value), self.of(held)]
            case staticmethod() | classmethod():
                return [type(value).__name__, self.of(value.__func__)]
            case property():
                return ["property", *self._all((value.fget, value.fset, value.fdel))]
            case types.ModuleType():
                return ["module", value.__name__]
            case type():
                return list(self._class(value))
        return []

    def _pairs(self, mapping: Mapping[Any, Any]) -> Iterator[bytes]:
        for key, name in sorted(((self.of(name), name) for name in mapping), key=lambda pair: pair[0]):
            yield key
            yield self.of(mapping[name])

    # -- code ----------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        code = function.__code__
        yield "function"
        if code.co_filename.startswith((*_INSTALLED, "<frozen ")):
            # A library's wrapper may hold a user's function.
            yield from (function.__module__ or "", code.co_qualname, _version_of(function.__module__))
        else:
            yield self.of(code)
            yield from self._globals(function)
        yield self.of(function.__defaults__)
        yield self.of(function.__kwdefaults__)
        yield self.of({name: held for name, held in vars(function).items() if name not in _NOT_BEHAVIOUR})
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:
                yield "empty cell"

    def _code(self, code: types.CodeType) -> Iterator[str | bytes]:
        yield "code"
        yield from (code.co_code, code.co_exceptiontable, str(code.co_flags), str(code.co_argcount))
        yield from (str(code.co_posonlyargcount), str(code.co_kwonlyargcount))
        yield from (" ".join(names) for names in (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars))
        yield from self._all(code.co_consts)

    def _globals(self, function: types.FunctionType) -> Iterator[str | bytes]:
        """The values of the globals that the code names; for a user's module, the attributes that it names."""
        named = function.__globals__
        for path in dict.fromkeys(_paths(function.__code__)):
            first, *rest = path
            if first not in named:
                yield from ("builtin or missing", first)
                continue
            value = named[first]
            for name in rest:
                if not isinstance(value, types.ModuleType) or is_installed(value) or not hasattr(value, name):
                    break
                value = getattr(value, name)
            yield from ("global", ".".join(path), self.of(value))

    def _class(self, kind: type) -> Iterator[str | bytes]:
        yield from ("class", _name_of(kind))
        module = sys.modules.get(kind.__module__)
        if module is not None and is_installed(module):
            yield _version_of(kind.__module__)
            return
        yield from self._all(kind.__bases__)
        yield from self._pairs({name: held for name, held in vars(kind).items() if name not in _NOT_BEHAVIOUR})

    # -- objects -------------------------------------------------------------------------------------------

    def _object(self, value: Any) -> Iterator[str | bytes]:
        """What a copy of the object would keep: its class, what it was made from, its attributes, its items."""
        yield "object"
        yield self.of(type(value))
        try:
            kept: str | tuple[Any, ...] = value.__reduce_ex__(2)
        except Exception:  # it hides what it holds
            kept = ""
        if isinstance(kept, str):
            # A function in a C wrapper, such as functools.cache, is reduced to its name.
            yield kept
            yield self.of(getattr(value, "__dict__", {}).get("__wrapped__"))
            return
        make, arguments, state, items, pairs = (*kept, None, None, None)[:5]
        yield from self._all((make, arguments, _without_cached(type(value), state)))
        yield from self._all((list(items or ()), dict(pairs or ())))


def _hash(*parts: str | bytes) -> bytes:
    """SHA-256 of parts, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        written = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(struct.pack("<?q", isinstance(part, str), len(written)))
        found.update(written)
    return found.digest()


def _text(value: bool | int | float | complex | str | bytes | None) -> str | bytes:
    if isinstance(value, str | bytes):
        return value
    return hex(value) if isinstance(value, int) else repr(value)


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """The globals that the code, and code nested in it, names, each with the attributes read directly from it."""
    path: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if path:
                yield tuple(path)
            path = [step.argval]
        elif path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(step.argval)
        elif path:
            yield tuple(path)
            path = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _paths(constant)


def _without_cached(kind: type, state: Any) -> Any:
    """An object's state without its cached properties."""
    if not isinstance(state, dict):
        return state
    return {
        name: value
        for name, value in state.items()
        if not isinstance(getattr(kind, str(name), None), functools.cached_property)
    }


def is_installed(module: types.ModuleType) -> bool:
    """Whether a module's version says what it does: it is built in, or belongs to an installed package."""
    if module.__name__ == "__main__":
        return False
    file: str | None = getattr(module, "__file__", None)
    if file is None:
        return not hasattr(module, "__path__")
    return os.path.abspath(file).startswith(_INSTALLED)


def _version_of(module: str | None) -> str:
    package = sys.modules.get((module or "").partition(".")[0])
    found = getattr(package, "__version__", "")
    return found if isinstance(found, str) else ""
