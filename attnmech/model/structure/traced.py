"""Traces one pass of a model of unknown structure: every call of a module, and of the attention function.

The pass runs on a copy that uses attnmech's own attention, so it shows what every later pass computes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...batch import Batch
from ...maths.float64 import as_float64
from ..attention.attend import Site, attention_of_site
from ..attention.in_force import InForce, Pass
from ..parts.mask import mask_rule

TRACED: Final = "attnmech_traced"  # the name under which transformers finds the attention function of a traced pass


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its arguments and what it returned."""

    path: str
    module: nn.Module
    input: Tensor | None  # its first input tensor, before the call
    made: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    order: int  # the number of this call, counted as calls end, over all calls of the pass

    @property
    def output(self) -> Tensor | None:
        """The first tensor that it returned; None if it returned none."""
        return self.made[0] if self.made else None


@dataclass(frozen=True, eq=False)
class Attended:
    """One call of the attention function: its arguments, and z."""

    module: nn.Module
    q: Float[Tensor, "batch position head d_head"]
    k: Float[Tensor, "batch key kv_head d_head"]
    v: Float[Tensor, "batch key kv_head d_value"]
    z: Float[Tensor, "batch position head d_value"]
    mask: Any
    options: Mapping[str, Any]
    order: int


@dataclass(eq=False)
class Trace:
    """The calls of one pass, in order."""

    in_force: InForce = field(default_factory=InForce)
    attended: list[Attended] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    output: Any = None
    n_attended: int = 0  # the number of calls of the attention function
    _ticks: int = 0

    def tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def take(self, path: str) -> tuple[Attended, list[Call]]:
        """Removes the calls inside a block that has ended from the trace; returns all of it, with paths within it."""
        within = calls_within(self.calls, path)
        self.calls = [call for call in self.calls if not call.path.startswith(f"{path}.")]
        return self.attended.pop(), within

    def call(self, path: str) -> Call | None:
        """The last call of a module."""
        return next((call for call in reversed(self.calls) if call.path == path), None)


def calls_within(calls: Iterable[Call], path: str) -> list[Call]:
    """Those of some calls that are of a module or inside it, with paths from this module down."""
    within = (call for call in calls if call.path == path or call.path.startswith(f"{path}."))
    return [replace(call, path=call.path[len(path) + 1 :]) for call in within]


_UNDER_WAY: ContextVar[Trace] = ContextVar("traced pass")


def trace_pass(
    model: nn.Module, inputs: Mapping[str, Any], recorded: Mapping[str, nn.Module], ended: Callable[[Trace, str], None]
) -> Trace:
    """Runs a copy prepared by `use_attention(copy, TRACED)`, and records the calls of some modules by their paths.

    `ended` is called with the path of each recorded module when its call ends.
    """
    trace = Trace()
    # A traced pass uses nothing of its batch but the number of texts.
    rows = next(tensors_of(tuple(inputs.values())))
    ids = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), (), None)
    token = _UNDER_WAY.set(trace)
    try:
        with (
            torch.no_grad(),
            recording(trace, recorded, ended),
            trace.in_force.unchecked(),
            trace.in_force.recording(Pass(batch)),
        ):
            trace.output = model(**inputs, return_dict=True)
    finally:
        _UNDER_WAY.reset(token)
    return trace


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or output: the value itself, or the tensors in a tuple or list."""
    for entry in value if isinstance(value, tuple | list) else (value,):
        if isinstance(entry, torch.Tensor):
            yield entry


@contextmanager
def recording(trace: Trace, recorded: Mapping[str, nn.Module], ended: Callable[[Trace, str], None]) -> Iterator[None]:
    """Records the calls of some modules."""
    with ExitStack() as hooks:
        for path, module in recorded.items():
            entering, leaving = _hooks(trace, path, ended)
            hooks.enter_context(module.register_forward_pre_hook(entering, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leaving, with_kwargs=True))
        yield


def _hooks(
    trace: Trace, path: str, ended: Callable[[Trace, str], None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    before: list[Tensor | None] = []

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(tensors_of((*args, kwargs.get("hidden_states"), *kwargs.values())), None)
        # A block may later add to this tensor in place.
        before.append(None if first is None else first.detach().clone())

    def leaving(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = tuple(tensor.detach().clone() for tensor in tensors_of(output))
        trace.calls.append(Call(path, module, before.pop(), made, args, kwargs, trace.tick()))
        ended(trace, path)

    return entering, leaving


def traced_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of a traced pass."""
    trace = _UNDER_WAY.get()
    module.attnmech_site = Site(trace.in_force, trace.n_attended)  # type: ignore[assignment]
    z, _ = attention_of_site(module, query, key, value, attention_mask, **options)
    q, k, v = (
        rearrange(tensor, "batch head position d -> batch position head d").clone() for tensor in (query, key, value)
    )
    trace.n_attended += 1
    trace.attended.append(Attended(module, q, k, v, z.clone(), attention_mask, options, trace.tick()))
    return z, None


AttentionInterface.register(TRACED, traced_attention)
AttentionMaskInterface.register(TRACED, mask_rule)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal to the last bit."""
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


def by_token(value: Tensor | None, batch: int, length: int) -> Float[Tensor, "batch position features"] | None:
    """A tensor `[batch position features]`, made from one that may have axes for heads; None for any other tensor."""
    if value is None or not value.is_floating_point():
        return None
    if value.ndim >= 3 and value.shape[:2] == (batch, length):
        return value.reshape(batch, length, -1)
    if value.ndim == 2 and len(value) == batch * length:
        return value.reshape(batch, length, -1)
    if value.ndim == 4 and value.shape[0] == batch and value.shape[2] == length:
        return rearrange(value, "batch head position d -> batch position (head d)")
    return None


def distance(one: Tensor, other: Tensor) -> float:
    """The distance between two tensors, relative to the size of the second.

    >>> distance(torch.tensor([3.0, 6.5]), torch.tensor([3.0, 4.0]))
    0.5
    """
    return float((one - other).norm() / other.norm()) if one.shape == other.shape else torch.inf


def factor_of(total: Tensor, value: Tensor) -> float:
    """The r for which r · value is nearest to the total.

    >>> factor_of(torch.tensor([3.0, 6.0]), torch.tensor([1.0, 2.0]))
    3.0
    """
    return float((total * value).sum() / value.pow(2).sum())


def columns_of(
    target: Float[Tensor, "row wanted"], source: Float[Tensor, "row there"], epsilon: float, scale: float = 1.0
) -> tuple[tuple[int, ...], float] | None:
    """For each column of `target`, the column of `source` that equals it up to a common factor; None if one has no
    match.

    ε is the rounding of the entries: cosines of equal columns then differ from 1 by a few ε² at most. Rotary tables may
    have multiplied some columns by `scale` as well; the factor returned is that of the first column.

    >>> source = torch.tensor([[1.0, 5.0, -2.0], [4.0, 0.0, 3.0]])
    >>> columns_of(2 * source[:, [2, 0]], source, 1e-7)
    ((2, 0), 2.0)
    """
    wanted, there = as_float64(target), as_float64(source)
    sizes, lengths = wanted.norm(dim=0), there.norm(dim=0)
    if not len(lengths) or not bool((sizes > 0).all()):
        return None
    alike = (wanted / sizes).T @ (there / lengths.clamp_min(torch.finfo(torch.float64).tiny))
    best = alike.max(dim=1)
    factors = sizes / lengths[best.indices]
    if scale != 1:
        factors = factors / scale ** ((factors / factors[0]).log() / math.log(scale)).round().clamp(-1, 1)
    factor = float(factors.median())
    near, least = 64 * epsilon, 1 - max(1e-9, 32 * epsilon**2)
    if bool((best.values < least).any()) or bool(((factors - factor).abs() > near * factor).any()):
        return None
    # All columns together give the factor more exactly than one; in 16 bits, YaRN's 1.1 must not pass for 1.
    return tuple(best.indices.tolist()), 1.0 if abs(factor - 1) <= epsilon / 4 else factor


class Factors:
    """The numbers of a config, to recognise measured factors."""

    def __init__(self, config: Any, epsilon: float) -> None:
        self.epsilon = epsilon
        self.numbers = {
            name: float(value)
            for name, value in config.to_dict().items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value
        }
        self.has_rotary = bool(getattr(config, "rope_parameters", None))  # it gives the base of angles
        self._known, layers = [1.0], self.numbers.get("num_hidden_layers", 1.0)
        for value in self.numbers.values():
            self._known += [value, 1 / value]
            if value > 0:
                self._known += [value**0.5, value**-0.5, value * layers**-0.5]

    def knows(self, factor: float) -> bool:
        """Whether a factor is a number of the config, or simply derived from one."""
        return factor in self._known

    def named(self, factor: float, d_head: int = 1, within: float = 0.0) -> float:
        """The exact value of a measured factor; if no candidate is near, the measured factor.

        That number may be 1, 1/√d_head, a number of the config, its root, the inverse of either, or a number of the
        config over √layers (MiniCPM). `within` is the allowed error of the measurement, besides rounding.
        """
        within = max(within, max(1e-4, self.epsilon) * abs(factor))
        near = min([d_head**-0.5, *self._known], key=lambda known: abs(known - factor))
        return near if abs(near - factor) <= within else factor
