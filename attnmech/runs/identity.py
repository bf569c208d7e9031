"""Identifies a run by versions, weights, options, inputs, and a digest of its functions.

A digest is the same in every process. It covers compiled code, defaults, the values in closures and the globals that
the code names, recursively. Installed classes are identified by name, objects that hide their content (a lock, a file)
by class.
"""

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch

from ..basics.installed import is_installed
from ..model.parts.hashes import tensors_hash
from ..model.run.hooked import HookedModel


def identity_of(model: HookedModel, weights: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a run must share with a journal to resume from it; `weights` is the model's `weights_hash`."""
    return {
        **{package: version(package).partition("+")[0] for package in ("attnmech", "torch", "transformers")},
        "python": "{}.{}".format(*sys.version_info),
        "model": model.name,
        "weights": weights,
        "hooks": list(model.edited),
        "code and values of the hooks": [[*point, digest_of(edit)] for point, edit in model.in_force.edit_functions],
        "interventions": [intervention.digest for intervention in model.interventions],
        **rest,
    }


def digest_of(value: Any, known: dict[int, tuple[object, str]] | None = None) -> str:
    """SHA-256 of the parts of a function, a class or an object; `known` holds the digests of parts, by id."""
    known = {} if known is None else known
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        content = value if isinstance(value, bytes) else repr(value).encode()
        return hashlib.sha256(type(value).__name__.encode() + content).hexdigest()
    if id(value) not in known:
        known[id(value)] = value, "itself"  # in case it contains itself
        parts = [digest_of(part, known) for part in _parts(value)]
        ordered = sorted(parts) if type(value) in (dict, set, frozenset) else parts
        known[id(value)] = value, hashlib.sha256(" ".join(ordered).encode()).hexdigest()
    return known[id(value)][1]


def _parts(value: Any) -> Iterable[object]:
    match value:
        case torch.Tensor() if value.layout == torch.strided and not value.is_meta:
            return "tensor", tensors_hash({"": value})
        case HookedModel():
            return "model", value.name, value.weights_hash
        case types.ModuleType():
            return "module", value.__name__
        case types.CodeType():
            return "code", value.co_code, value.co_exceptiontable, value.co_names, value.co_consts
        case types.FunctionType():
            installed = is_installed(sys.modules.get(value.__globals__.get("__name__", "")))
            named = () if installed else tuple(_globals(_names(value.__code__), value.__globals__))
            defaults = value.__defaults__, value.__kwdefaults__
            return "function", value.__code__, named, defaults, vars(value), value.__closure__
        case type():
            installed = is_installed(sys.modules.get(value.__module__))
            body = {name: held for name, held in vars(value).items() if callable(held) or not name.startswith("__")}
            return "class", value.__module__, value.__qualname__, *(() if installed else (value.__bases__, body))
        case types.MethodType() | property() | staticmethod() | classmethod() | functools.cached_property():
            names = ("__func__", "__self__", "fget", "fset", "fdel", "func")
            return type(value), *(getattr(value, name, None) for name in names)
        case types.MappingProxyType():
            return "mapping", dict(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value), *value
    return type(value), *(value.items() if type(value) is dict else _kept(value))


def _kept(value: Any) -> Iterable[object]:
    """The parts of an object that a copy would have, without cached properties; none if the object hides them."""
    try:
        kept = (value.cell_contents,) if isinstance(value, types.CellType) else value.__reduce_ex__(2)
    except Exception:  # a user's object may raise anything
        return ()
    if isinstance(kept, str):  # the name of a function written in C, such as a wrapper of functools.cache
        return kept, getattr(value, "__module__", None), getattr(value, "__wrapped__", None)
    make, arguments, state, items, pairs = (*kept, None, None, None, None)[:5]
    if isinstance(state, dict):
        state = {name: held for name, held in state.items() if not hasattr(getattr(type(value), name, 0), "attrname")}
    return make, arguments, state, list(items or ()), list(pairs or ())


def _globals(names: set[str], space: Mapping[str, Any], depth: int = 3) -> Iterator[tuple[str, object]]:
    """The globals with these names, including those in the user's own modules, such as `helpers.BY`."""
    for name in sorted(names & space.keys()):
        yield name, space[name]
        if depth and isinstance(space[name], types.ModuleType) and not is_installed(space[name]):
            yield from _globals(names, vars(space[name]), depth - 1)


def _names(code: types.CodeType) -> set[str]:
    """The names that compiled code, and code nested in it, looks up."""
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*nested)
