"""Forms messages: quotes other libraries' errors, begins sentences, and points warnings at the user's line."""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeVar

Made = TypeVar("Made")


class LongTextWarning(UserWarning):
    """A text is longer than those on which the model was trained."""


class _Call(NamedTuple):
    arguments: Collection[str] | None  # the names of its arguments; None if it takes any
    warned: set[type[Warning]]  # the kinds of warnings so far


_call: Final[ContextVar[_Call | None]] = ContextVar("call", default=None)  # the outermost one; messages are about it


def first_line(error: BaseException) -> str:
    """An error's message in one line: its first line, joined to the second if the first ends in a colon; long ones are
    cut.

    Of an input or output error of a library in Rust, only the system's reason.

    >>> first_line(ValueError("Bad field:\\n  too small"))
    'Bad field: too small'
    >>> first_line(ValueError("Error while serializing: I/O error: No space left on device (os error 28)"))
    'No space left on device'
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    of_system = re.search(r"([^:]+) \(os error \d+\)$", line)
    return of_system[1].strip() if of_system else line


def noted(notes: list[str], omitted: str, make: Callable[[], Made], *refused: type[Exception]) -> Made | None:
    """What a function returns; None if it raises an error that is `refused`, with a note on what is omitted and why."""
    try:
        return make()
    except refused as error:
        notes.append(f"{omitted} omitted: {first_line(error)}")
        return None


def capitalised(sentence: str) -> str:
    """Begins a sentence with a capital letter; other letters stay.

    >>> capitalised("zero ablation of L0H1.")
    'Zero ablation of L0H1.'
    """
    return sentence[:1].upper() + sentence[1:]


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the nearest caller outside this package."""
    frame, depth = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "attnmech":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)


@contextmanager
def in_call(arguments: Collection[str] | None) -> Iterator[None]:
    """Says that the block is a public call with these arguments (None: any), unless it is part of another."""
    token = None if _call.get() is not None else _call.set(_Call(arguments, set()))
    try:
        yield
    finally:
        if token is not None:
            _call.reset(token)


def takes(argument: str) -> bool:
    """Whether the public call under way has an argument, so that a message can name it."""
    call = _call.get()
    return call is None or call.arguments is None or argument in call.arguments


def warn_once(message: str, category: type[Warning]) -> None:
    """As `warn_user`, once for each kind of warning in a public call."""
    call = _call.get()
    if call is None or category not in call.warned:
        warn_user(message, category)
    if call is not None:
        call.warned.add(category)
