"""Makes public calls raise `InputError` for arguments that do not fit their signatures."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast, get_args, is_typeddict

from ..errors import InputError

T = TypeVar("T")


def public(thing: T) -> T:
    """Marks a function, or a class with its constructor and methods, as public: its arguments are checked.

    >>> @public
    ... def scaled(value: float, *, factor: float = 2.0) -> float:
    ...     return factor * value
    >>> scaled(3.0, facto=4.0)
    Traceback (most recent call last):
    attnmech.errors.InputError: `scaled` has no argument `facto`; try `factor`. Its arguments are value, factor.
    """
    if not isinstance(thing, type):
        return cast(T, _checked(cast(Callable[..., Any], thing)))
    _check_member(thing, "__init__")
    check_methods(thing)
    return thing


def check_methods(cls: type) -> None:
    """Checks the arguments of the public methods of a class, including those it inherits within this package."""
    for kind in cls.__mro__:
        if kind.__module__.startswith("attnmech."):
            for name in [name for name in vars(kind) if not name.startswith("_")]:
                _check_member(kind, name)


def require_arguments(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises `InputError` for arguments that do not fit the signature of a function."""
    takes = _taken_by(function)
    if takes.names is not None and not options.keys() <= takes.names.keys():
        raise InputError(_about_unknown(function, takes.names, options))
    try:
        takes.signature.bind(*arguments, **options)
    except TypeError:
        raise InputError(_about_places(function, takes.signature, arguments, options)) from None


class _Taken(NamedTuple):
    signature: inspect.Signature
    names: dict[str, None] | None
    """All names of arguments, in order; None if the function takes any."""


@cache
def _taken_by(function: Callable[..., Any]) -> _Taken:
    signature = inspect.signature(function)
    names: dict[str, None] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            options = next(iter(get_args(parameter.annotation)), None)  # of Unpack
            if not is_typeddict(options):
                return _Taken(signature, None)
            names |= dict.fromkeys(options.__annotations__)
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in ("self", "cls"):
            names[parameter.name] = None
    return _Taken(signature, names)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        require_arguments(function, arguments, options)
        return function(*arguments, **options)

    checked.is_public = True  # type: ignore[attr-defined]
    return checked


def _check_member(kind: type, name: str) -> None:
    member = vars(kind).get(name)
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if inspect.isfunction(function) and not hasattr(function, "is_public"):
        wrap: Any = type(member)  # classmethod or staticmethod
        checked = _checked(function)
        setattr(kind, name, checked if member is function else wrap(checked))


def _name_of(function: Callable[..., Any]) -> str:
    """The name that a caller writes: of a constructor, the class's."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name.removesuffix(".__init__").rpartition(".")[2]


def _about_unknown(function: Callable[..., Any], names: Mapping[str, None], options: Mapping[str, Any]) -> str:
    unknown = next(name for name in options if name not in names)
    nearest = "".join(f"; try `{name}`" for name in get_close_matches(unknown, names, n=1))
    listed = f"Its arguments are {', '.join(names)}." if names else "It takes none."
    return f"`{_name_of(function)}` has no argument `{unknown}`{nearest}. {listed}"


def _about_places(
    function: Callable[..., Any], signature: inspect.Signature, arguments: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """Says which argument is missing, given twice, or one too many."""
    name, parameters = _name_of(function), list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters, arguments = parameters[1:], arguments[1:]
    placed = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for parameter in placed[: len(arguments)]:
        if parameter.name in options:
            return f"`{name}` got `{parameter.name}` twice, by position and as a keyword."
    if len(arguments) > len(placed):
        order = f" ({', '.join(parameter.name for parameter in placed)})" if placed else ""
        rest = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        others = f" Pass the others as keywords: {', '.join(rest)}." if rest else ""
        return f"`{name}` takes at most {len(placed)} arguments by position{order}; got {len(arguments)}.{others}"
    known = {parameter.name for parameter in placed[: len(arguments)]} | options.keys()
    missing = [
        f"`{parameter.name}`"
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and parameter.name not in known
    ]
    return f"`{name}` needs {' and '.join(missing)}."
