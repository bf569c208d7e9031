"""Finds the modules whose outputs a block adds to its stream, and their factors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from ...maths.float64 import as_float64
from .traced import Call, Factors, by_token, same

_LEAST: Final = 1e-2  # the smallest factor that counts: with a factor of 0, any value would fit

_EXACT: Final = 1e-12  # factors that differ relatively by no more than this are the same, measured in a float64 model

_Stream = Float[Tensor, "batch position features"]


@dataclass(frozen=True)
class Fit:
    """The factors of the parts of a sum, and the distance of the resulting sum from the total."""

    factors: Sequence[float]
    apart: float


def _as_stored(named: float, measured: float) -> float:
    """A named factor or its value in a lower precision: a float64 model may hold a parameter made in float32."""
    stored = (float(torch.tensor(named, dtype=kind)) for kind in (torch.float32, torch.float16, torch.bfloat16))
    values = (value for value in (named, *stored) if abs(value - measured) <= _EXACT * abs(value))
    return next(values, named)


class StreamSums:
    """Finds the sums of a block's stream and its modules' outputs; `attention` is the path of its attention."""

    def __init__(
        self, stream: _Stream, ended: _Stream, calls: Sequence[Call], factors: Factors, attention: str
    ) -> None:
        self._stream, self._ended, self._calls, self._factors, self._path = stream, ended, calls, factors, attention

    def middle(self, written: Sequence[tuple[Call, _Stream]], later: Sequence[Call]) -> tuple[Call, Call, float] | None:
        """The first module that reads stream + r · attention's output, the module that returns this output, and r."""
        for call, entering in self._reading(later):
            fits = [(self.fitted(entering, self._stream, [value]), writer) for writer, value in written]
            fitting = [(fit, writer) for fit, writer in fits if fit is not None]
            if fitting:
                least = min(fit.apart for fit, _ in fitting)
                fit, writer = next(candidate for candidate in fitting if candidate[0].apart <= 2 * least)
                return call, writer, fit.factors[0]
        return None

    def beside(
        self, written: Sequence[tuple[Call, _Stream]], later: Sequence[Call]
    ) -> tuple[tuple[Call, Call, float], Call, float] | None:
        """As `middle`, where another module writes in the same step; also returns that module and its factor."""
        mixers = [
            (call, value) for call, value in self.writes(0)
            if self.outermost(call, 0) and not f"{self._path}.".startswith(f"{call.path}.")
        ]  # fmt: skip
        for call, entering in self._reading(later):
            for writer, value in written:
                for mixer, other in mixers:
                    before = mixer.order < call.order
                    fit = self.fitted(entering, self._stream, [value, other]) if before else None
                    if fit is not None:
                        return (call, writer, fit.factors[0]), mixer, fit.factors[1]
        return None

    def _reading(self, later: Sequence[Call]) -> Iterator[tuple[Call, _Stream]]:
        """The modules that read a stream other than the block's input, each with that stream."""
        for call in later:
            entering = by_token(call.input, *self._stream.shape[:2])
            if entering is not None and entering.shape == self._stream.shape and not same(entering, self._stream):
                yield call, entering

    def added(self, start: _Stream, total: _Stream, after: int, before: int | None = None) -> tuple[Call, float] | None:
        """The outermost module with `total` = `start` + factor · its output, and the factor."""
        fitting = []
        if same(total, start):
            # A pruned MLP may write nothing.
            silent = [call for call, value in self.writes(after) if not bool(value.any())]
            return (silent[-1], 1.0) if silent else None
        for call, value in self.writes(after):
            fit = self.fitted(total, start, [value]) if before is None or call.order < before else None
            if fit is not None:
                fitting.append((call, fit))
        if not fitting:
            return None
        least = min(fit.apart for _, fit in fitting)
        alike = [(call, fit.factors[0]) for call, fit in fitting if fit.apart <= 2 * least]
        return min(alike, key=lambda candidate: (candidate[0].path.count("."), candidate[0].order))

    def added_together(self, start: _Stream, after: int) -> tuple[Call, Call, float] | None:
        """Two modules such that the block returns `start` + factor · (sum of their outputs), in the order in which they
        end.

        Neither module is inside another one that writes into the stream.
        """
        calls = [(call, value) for call, value in self.writes(after) if self.outermost(call, after)]
        for place, (first, one) in enumerate(calls):
            for last, other in calls[place + 1 :]:
                fit = self.fitted(self._ended, start, [one, other])
                if fit is not None and fit.factors[0] == fit.factors[1]:
                    return first, last, fit.factors[0]
        return None

    def fitted(self, total: _Stream, start: _Stream, parts: Sequence[_Stream]) -> Fit | None:
        """The factors r of total = start + Σ r · part; None if no factors fit, or one of them is almost 0."""
        columns = torch.stack([as_float64(part).flatten() for part in parts], dim=1)
        difference = (as_float64(total) - as_float64(start)).flatten()
        factors = torch.linalg.lstsq(columns, difference[:, None]).solution[:, 0]
        added = float((columns * factors).norm())
        slack = 4 * self._factors.epsilon * (float(as_float64(start).norm()) + added)
        apart = float((difference - columns @ factors).norm())
        if bool((factors.abs() < _LEAST).any()) or apart > min(slack, added / 2):
            return None
        within = (slack / columns.norm(dim=0)).tolist()
        named = [
            _as_stored(self._factors.named(r, within=off), r) for r, off in zip(factors.tolist(), within, strict=True)
        ]
        return Fit(named, apart)

    def writes(self, after: int) -> Iterator[tuple[Call, _Stream]]:
        """The modules that ended after the moment `after` and returned a tensor of the stream's shape."""
        for call in self._calls:
            value = by_token(call.output, *self._stream.shape[:2])
            if call.order > after and call.path and value is not None and value.shape == self._stream.shape:
                yield call, value

    def outermost(self, call: Call, after: int) -> bool:
        """Whether the module is inside none of the other modules that `writes` yields."""
        return not any(call.path.startswith(f"{other.path}.") for other, _ in self.writes(after))
