"""What is said of the largest value of a result, or of a difference of two?"""

from typing import Any, Final

from ..maths.intervals import TextMeans
from ..results.result import TextResult
from .claims import about_largest

_UNPAIRED: Final = "; the two are on different texts, so a difference has no interval"


def largest_of(result: TextResult, means: TextMeans, *named: Any, **words: Any) -> str:
    """The sentence of `about_largest`; for a difference on different texts, with the reason that it has no interval.

    Such a difference is one number, not one of a single text.
    """
    unpaired = result.parts is not None and not result.paired
    return about_largest(means, *named, no_interval_as=_UNPAIRED if unpaired else None, **words)
