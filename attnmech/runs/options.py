"""The options that all sweeps share: how a metric is measured, and how a sweep runs."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypedDict

from ..errors import InputError
from .answers import Answers
from .workers import Workers


class MeasuringOptions(TypedDict, total=False):
    """How a metric is measured on texts."""

    answers: Answers
    """For "logit_difference" and "accuracy": the right token of each text, as a string with its space or as an id."""
    against: Answers
    """For "logit_difference": the token that the answer is compared with."""
    bos: bool | None
    """Whether each text begins with the tokenizer's first token; None is what the model was loaded with."""
    memory: float
    """The memory that a step may use on top of the model, in GB; 1 by default."""
    progress: bool
    """Whether to show a progress bar."""


class SweepOptions(MeasuringOptions, total=False):
    """The same, and the options of a sweep's run."""

    journal: str | Path | None
    """A file for the measurements: after an interruption, the same call resumes from it; it is removed at the end."""
    engine: str | Workers
    """"local", or `am.Ray(...)`: worker processes on this machine or a cluster, with the same result."""
    partial: bool
    """Whether Ctrl-C returns the finished part instead of raising `KeyboardInterrupt`."""


def require_known(options: Mapping[str, object], kind: type) -> None:
    """Raises `InputError` for an unknown option, with the nearest name.

    >>> require_known({"memroy": 2.0}, MeasuringOptions)      # doctest: +ELLIPSIS
    Traceback (most recent call last):
    attnmech.errors.InputError: unknown option `memroy`; try `memory`. The options are answers, against, bos, ...
    """
    for name in options:
        if name not in kind.__annotations__:
            nearest = "".join(f"; try `{near}`" for near in get_close_matches(name, kind.__annotations__, n=1))
            raise InputError(f"unknown option `{name}`{nearest}. The options are {', '.join(kind.__annotations__)}.")
