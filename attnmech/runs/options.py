"""The options that everything which sweeps over heads or places shares: how it is measured, and how it runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from .answers import Answers


class MeasuringOptions(TypedDict, total=False):
    """How a metric is measured on texts."""

    answers: Answers
    """For "logit_difference" and "accuracy": the right token of each text, as text with its space, or as id."""
    against: Answers
    """For "logit_difference": the token that it is compared with."""
    bos: bool | None
    """Whether each text begins with the tokenizer's first token; None is what the model was loaded with."""
    memory: float
    """By how many GB a step may grow; 1 if left out."""
    progress: bool
    """Whether a bar shows how far it is."""


class SweepOptions(MeasuringOptions, total=False):
    """The same, and what happens when a sweep is interrupted."""

    journal: str | Path | None
    """A file in which the sweep is kept: the same call resumes from it, and removes it at the end."""
    partial: bool
    """Whether Ctrl-C returns what is done so far, instead of raising `KeyboardInterrupt`."""


def require_known(options: Mapping[str, object], kind: type) -> None:
    """Raises `TypeError`, as Python does of functions, for an option that there is not.

    >>> require_known({"memroy": 2.0}, MeasuringOptions)
    Traceback (most recent call last):
    TypeError: unexpected option 'memroy'; the shared options are answers, against, bos, memory, progress
    """
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"unexpected option {name!r}; the shared options are {', '.join(kind.__annotations__)}")
