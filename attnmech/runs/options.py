"""Defines the options that many calls share."""

from pathlib import Path
from typing import TypedDict

from .answers import Answers
from .workers import Workers


class CommonOptions(TypedDict, total=False):
    """The options of every run over texts."""

    bos: bool | None
    """Whether each text begins with the tokenizer's BOS or CLS token; None is what the model was loaded with."""
    progress: bool
    """Whether to show a progress bar."""


class RunOptions(CommonOptions, total=False):
    """The options that say how a long run is carried out."""

    journal: str | Path | None
    """The path of a file that stores the state of the run. After an interruption, the same call resumes from the file;
    it is removed at the end."""
    engine: str | Workers
    """"local", or `am.Ray(...)`: worker processes on this machine or a cluster, with the same result."""


class CorpusOptions(RunOptions, total=False):
    """The options of a pass over a whole corpus."""

    truncate: bool
    """Whether documents that are too long for the model, or longer than those on which it was trained, are cut, and
    counted."""


class StreamOptions(CorpusOptions, total=False):
    """The options of a pass over a corpus or one shard of it, as in `am.stream`, whose results have `merged`."""

    shard: tuple[int, int]
    """(k, n) takes every n-th document from the k-th on."""
    keep_rows: bool | None
    """Whether the numbers of every row are kept; by default those of a text or a list."""


class MeasuringOptions(CommonOptions, total=False):
    """The options that say how a metric is measured on texts."""

    answers: Answers
    """For "logit_difference" and "accuracy": the right token of each text, as a string with its space or as an id."""
    against: Answers
    """For "logit_difference": the token with which the answer is compared."""
    memory: float
    """The memory that a step may use on top of the model, in GB; 1 by default."""


class SweepOptions(MeasuringOptions, RunOptions, total=False):
    """The options of a sweep: how its metric is measured, and how it runs."""

    partial: bool
    """Whether Ctrl-C returns the finished part instead of raising `KeyboardInterrupt`."""
