"""Finds where the batches of a run are carried out: in this process, or by the workers of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ..basics.arguments import shown
from ..basics.messages import warn_user
from ..errors import InputError
from .corpus import CorpusBatch
from .journal import Journal
from .progress import Meter, Steps


class LeftOutWarning(UserWarning):
    """Documents are missing from a result, because every worker that received one of them ended."""


class Workers(ABC):
    """Worker processes that carry out the batches of a run, such as `am.Ray`."""

    @abstractmethod
    def reading(self, inputs: Any) -> Any:
        """The same corpus, read by the workers' cluster if possible."""

    @abstractmethod
    def stream(self, work: Any, parts: Iterator[CorpusBatch], total: Any, journal: Journal | None, bar: Meter) -> None:
        """Adds the states of each batch, from the reducers of `work`, a `Streaming`, to `total`, a `Total`."""

    @abstractmethod
    def sweep(self, work: Any, parts: Sequence[CorpusBatch], bar: Steps) -> None:
        """Measures, on each batch, what is missing in the record of `work`, a `Sweeping`."""


def workers_of(engine: object) -> Workers | None:
    """The workers of an engine; None for "local", which is this process."""
    if isinstance(engine, str) and engine == "local":
        return None
    if not isinstance(engine, Workers):
        raise InputError(f'`engine` must be "local" or an am.Ray, such as am.Ray(workers=2); got {shown(engine)}.')
    return engine


def warn_left_out(documents: Sequence[int]) -> dict[str, Any]:
    """Warns of documents that were left out, and returns the entry for the provenance."""
    if not documents:
        return {}
    numbers = sorted(documents)
    listed = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    which = f"document {listed} is" if len(numbers) == 1 else f"documents {listed} ({len(numbers)} in all) are"
    it = "it" if len(numbers) == 1 else "one of them"
    warn_user(
        f"{which} left out: every worker that received {it} ended, usually for want of memory. The result holds all "
        f"others.",
        LeftOutWarning,
    )
    return {"left out": numbers}
