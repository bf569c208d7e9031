"""What does attnmech raise when it cannot use what a user gave it?

Every message says what was expected, what arrived, and what to try; `AttnmechError` catches them all.
Each class derives from the built-in that a caller would expect (`ValueError`, `FileNotFoundError`, ...).
"""

import operator
from typing import Any


class AttnmechError(Exception):
    """Base of every error that attnmech raises on purpose."""


class InputError(AttnmechError, ValueError):
    """A text, a token id, a layer, a head or an option that the model or the call cannot take."""


class ModelNotFoundError(AttnmechError, FileNotFoundError):
    """No weights at a model's name or folder."""


class UnsupportedModelError(AttnmechError, TypeError):
    """The model has no attention, or a kind that attnmech cannot express exactly."""


class WeightsError(AttnmechError, ValueError):
    """The weights cannot be used: not finite, missing, or in a precision that this device does not support."""


class MissingPointError(AttnmechError, KeyError):
    """An activation point that this model does not have, or that the run did not capture."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ExactnessError(AttnmechError, ArithmeticError):
    """A decomposition does not add up to what the model computed, so nothing is reported."""


class CertificateError(AttnmechError, RuntimeError):
    """A check of the certificate failed: a hook does not mean what its name says."""


class OutputError(AttnmechError, OSError):
    """A result cannot be written to the given path."""


class JournalError(AttnmechError, ValueError):
    """A journal that a run cannot resume from: another run's, one in use, or a damaged one."""


class ReducerError(AttnmechError, ValueError):
    """A reducer that returned something other than the tensors of its state, or NaN."""


class EngineError(AttnmechError, RuntimeError):
    """Workers on other processes or machines that cannot be reached, started or used."""


def first_line(error: BaseException) -> str:
    """Another library's error message in one line; the first line, with the second if the first ends in a colon.

    >>> first_line(ValueError("Bad field:\\n  too small"))
    'Bad field: too small'
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def integer(value: Any) -> int:
    """A whole number of any type as an int, numpy's and torch's too; `TypeError` for anything else, bools included.

    >>> integer(3)
    3
    """
    # Python's and torch's bools pass as ints; numpy's do not.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError(f"expected an int; got {value!r}")
    try:
        return operator.index(value)
    except RuntimeError as error:  # torch's, for a tensor without data
        raise TypeError(str(error)) from error


def index_of(name: str, value: object, count: int, owner: str = "") -> int:
    """A whole number from 0 to count − 1, whatever its type; `InputError` for anything else.

    >>> index_of("head", 3, 8)
    3
    """
    try:
        found = integer(value)
    except TypeError:
        found = -1
    if not 0 <= found < count:
        about = f" ({owner})" if owner else ""
        raise InputError(f"`{name}` must be from 0 to {count - 1}{about}; got {value!r}.")
    return found
