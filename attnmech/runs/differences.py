"""Writes the sentence about the largest value of a result, or of a difference of two results."""

from typing import Any, Final

from ..maths.intervals import TextMeans
from ..results.result import TextResult
from .claims import about_largest

_UNPAIRED: Final = "; the two are on different texts, so a difference has no interval"


def largest_of(result: TextResult, means: TextMeans, *named: Any, **words: Any) -> str:
    """The sentence of `about_largest`; a difference of results on different texts states why it has no interval."""
    unpaired = result.parts is not None and not result.paired
    return about_largest(means, *named, no_interval_as=_UNPAIRED if unpaired else None, **words)
