"""Checks annotations at every call, as jaxtyping's import hook does, in a fraction of the time.

jaxtyping's own decorator binds the arguments of every call to a signature and checks them twice, for its messages. Here
beartype checks arguments and value once, in jaxtyping's scope of axis names; jaxtyping's decorator only says what was
wrong with a call's arguments.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CellType, CodeType, FunctionType
from typing import Any, Final, get_type_hints
from unittest.mock import patch

import jaxtyping
from beartype import beartype
from beartype.roar import (
    BeartypeCallHintParamViolation,
    BeartypeCallHintReturnViolation,
    BeartypeDecorHintPep673Exception,
)
from jaxtyping import TypeCheckError, _decorator, _import_hook, config
from jaxtyping._storage import pop_shape_memo, push_shape_memo

_theirs: Callable[..., Any] = jaxtyping.jaxtyped


def check(package: str) -> None:
    """Checks every function and dataclass of a package, which must not have been imported yet."""
    jaxtyping.jaxtyped = jaxtyped
    _import_hook._JaxtypingLoader.exec_module = SourceFileLoader.exec_module
    _import_hook._JaxtypingLoader.get_code = _code
    jaxtyping.install_import_hook(package, "checking.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, except for functions with `Self`, which it accepts only when it decorates the whole class."""
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function


def jaxtyped(thing: Any = _decorator._sentinel, *, typechecker: Any = _decorator._sentinel) -> Any:
    """jaxtyping's decorator, with a faster check of functions and of constructors of dataclasses."""
    if thing is _decorator._sentinel:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and not hasattr(thing.__init__, "__checked__"):
            _check_constructor(thing, typechecker)
        return thing
    if isinstance(thing, FunctionType) and not thing.__annotations__:
        return thing  # nothing to check
    if isinstance(thing, FunctionType) and not inspect.isgeneratorfunction(thing):
        return _at_every_call(thing, typechecker)
    return _theirs(thing, typechecker=typechecker)


def _check_constructor(cls: Any, typechecker: Any) -> None:
    """Checks the fields of a dataclass, after the check of their names in a public one."""
    from attnmech.basics.public import public  # can be imported only once its package is checked

    init = cls.__init__
    fields = jaxtyped(inspect.unwrap(init), typechecker=typechecker)
    cls.__init__ = public(fields) if hasattr(init, "is_public") else fields


def _at_every_call(function: FunctionType, typechecker: Any) -> Callable[..., Any]:
    within = "<locals>" in function.__qualname__
    under_beartype = _inner(function) if within else beartype(_with_hints(function, function.__closure__))

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        push_shape_memo({})
        try:
            return under_beartype(*args, **kwargs)
        except BeartypeCallHintParamViolation:
            return _theirs(function, typechecker=typechecker)(*args, **kwargs)
        except BeartypeCallHintReturnViolation as wrong:
            raise TypeCheckError(str(wrong)) from wrong
        finally:
            pop_shape_memo()

    called.__checked__ = True  # type: ignore[attr-defined]
    return called


_INNER: Final[dict[tuple[str, CodeType], Callable[..., Any]]] = {}
"""The checks of nested functions, by module and code, since these functions are made anew in every call."""


def _inner(function: FunctionType) -> Callable[..., Any]:
    """beartype's checks around a function within another, written once for all functions of the same code."""
    key = (function.__module__, function.__code__)
    if key not in _INNER:
        # Its own variables, such as a model, would stay in memory with these checks.
        _INNER[key] = beartype(_with_hints(function, tuple(CellType() for _ in function.__closure__ or ())))
    checks = _INNER[key]
    # beartype returns a function as it is where no hint says anything.
    return functools.partial(checks, __beartype_func=function) if "__beartype_func" in _options(checks) else function


def _options(function: Callable[..., Any]) -> Any:
    return getattr(function, "__kwdefaults__", None) or {}


def _with_hints(function: FunctionType, closure: tuple[CellType, ...] | None) -> FunctionType:
    """The function with hints that beartype can read: without strings and `Self`."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = (
        function.__kwdefaults__, function.__qualname__, function.__module__
    )  # fmt: skip
    copy.__annotations__ = {
        name: Any if "typing.Self" in repr(hint) else hint for name, hint in _hints(function).items()
    }
    return copy


def _hints(function: FunctionType) -> dict[str, Any]:
    """The evaluated annotations; an annotation whose names do not exist at run time is not checked."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:
        there = function.__globals__
        return {name: _decorator._destring_annotation(hint, there) for name, hint in function.__annotations__.items()}


def _code(self: Any, name: str) -> CodeType | None:
    """A checked module's code, cached separately from unchecked code.

    jaxtyping says so for as long as the module is imported, and libraries that it imports are then compiled every time.
    """
    cached = functools.partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
    with patch("importlib._bootstrap_external.cache_from_source", cached):
        return SourceFileLoader.get_code(self, name)
