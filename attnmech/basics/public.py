"""Makes public calls check arguments against their signatures (`InputError`), outside torch's inference mode."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast, get_args, is_typeddict

from ..errors import InputError
from .messages import in_call

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


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message, which suggests the nearest of the `known` names; empty if none is near.

    >>> nearest("memroy", ["bos", "memory"])
    '; try `memory`'
    """
    return "".join(f"; try `{near}`" for near in get_close_matches(name, list(known), n=1))


class Arguments(NamedTuple):
    """The arguments that a function takes."""

    function: str  # the name that a caller writes; for a constructor, the name of the class
    signature: inspect.Signature
    names: Mapping[str, None] | None  # the names of all arguments, in order; None if the function takes any

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Arguments":
        """The arguments in a function's signature, including the options of a `TypedDict`."""
        signature, names, takes_any = inspect.signature(function), dict[str, None](), False
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                options = next(iter(get_args(parameter.annotation)), None)  # the TypedDict within Unpack
                takes_any = not is_typeddict(options)
                names |= dict.fromkeys(() if takes_any else options.__annotations__)
            elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in ("self", "cls"):
                names[parameter.name] = None
        name: str = getattr(function, "__qualname__", type(function).__qualname__)
        return cls(name.removesuffix(".__init__").rpartition(".")[2], signature, None if takes_any else names)

    def require(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Raises `InputError` for a call that does not fit the signature."""
        if self.names is not None and not keywords.keys() <= self.names.keys():
            raise InputError(self._about_unknown(self.names, keywords))
        try:
            self.signature.bind(*positional, **keywords)
        except TypeError:
            raise InputError(self._about_places(positional, keywords)) from None

    def _about_unknown(self, names: Mapping[str, None], keywords: Mapping[str, Any]) -> str:
        unknown = next(name for name in keywords if name not in names)
        listed = f"Its arguments are {', '.join(names)}." if names else "It takes none."
        return f"`{self.function}` has no argument `{unknown}`{nearest(unknown, names)}. {listed}"

    def _about_places(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> str:
        """Says which argument is missing or was passed twice, or that there are too many."""
        parameters = list(self.signature.parameters.values())
        if parameters and parameters[0].name in ("self", "cls"):
            parameters, positional = parameters[1:], positional[1:]
        placed = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        for name in placed[: len(positional)]:
            if name in keywords:
                return f"`{self.function}` got `{name}` twice, by position and as a keyword."
        if len(positional) > len(placed):
            order = f" ({', '.join(placed)})" if placed else ""
            others = f" Pass the others as keywords: {', '.join(named)}." if named else ""
            return (
                f"`{self.function}` takes at most {len(placed)} arguments by position{order}; got {len(positional)}."
                f"{others}"
            )
        missing = [
            f"`{name}`"
            for name in [*placed[len(positional) :], *named]
            if name not in keywords and self.signature.parameters[name].default is inspect.Parameter.empty
        ]
        return f"`{self.function}` needs {' and '.join(missing)}."


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def arguments() -> Arguments:
        return Arguments.of(function)

    @wraps(function)
    def checked(*positional: Any, **keywords: Any) -> Any:
        from torch import inference_mode, is_inference_mode_enabled  # torch takes a second to import

        arguments().require(positional, keywords)
        with in_call(arguments().names):
            if not is_inference_mode_enabled():
                return function(*positional, **keywords)
            # Tensors made in inference mode have no gradients, in later calls either.
            with inference_mode(False):
                return function(*positional, **keywords)

    checked.is_public = True  # type: ignore[attr-defined]
    return checked


def _check_member(kind: type, name: str) -> None:
    member = vars(kind).get(name)
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if inspect.isfunction(function) and not hasattr(function, "is_public"):
        wrap: Any = type(member)  # classmethod or staticmethod
        checked = _checked(function)
        setattr(kind, name, checked if member is function else wrap(checked))
