"""The states of a reducer: tensors by name, checked to keep their shapes and hold no NaN, and moved to the CPU."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import ExactnessError, ReducerError
from ..results.mean_qk import padded
from .reducer import Reducer, State

_TOGETHER_BYTES: Final = 2**22  # tensors up to this size are copied together


def on_cpu(state: State) -> State:
    """The state on the CPU; small tensors of a device come in one copy, since the CPU waits for each."""
    small: dict[torch.device, list[str]] = {}
    for name, value in state.items():
        if value.device.type != "cpu" and value.layout == torch.strided and value.nbytes <= _TOGETHER_BYTES:
            small.setdefault(value.device, []).append(name)
    copied: State = {}
    for names in small.values():
        # The widest types first, so that each tensor begins at a multiple of its numbers' size.
        names.sort(key=lambda name: -state[name].element_size())
        values = [state[name] for name in names]
        together = torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values]).cpu()
        for name, value, part in zip(names, values, torch.split(together, [one.nbytes for one in values]), strict=True):
            copied[name] = part.view(value.dtype).view(value.shape).clone()
    return {name: copied[name] if name in copied else value.cpu() for name, value in state.items()}


def summed_to_longer(one: Tensor, other: Tensor, axis: int = -1) -> Tensor:
    """The sum of both, with zeros at the end of the axis of the shorter one."""
    longest = max(one.shape[axis], other.shape[axis])
    return padded(one, longest, axis) + padded(other, longest, axis)


def shapes_of(reducer: Reducer, state: Any) -> dict[str, tuple[Any, ...]]:
    """The shape and dtype of each tensor; raises `ReducerError` for anything but a dictionary of tensors."""
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ReducerError(f"{reducer.name}: a state must be a dictionary of tensors by name; got {state!r}.")
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def require_same_shapes(reducer: Reducer, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises `ReducerError` if `add` has replaced a tensor by one of a different shape or dtype."""
    if before == after:
        return
    name = next(name for name in (*before, *after) if before.get(name) != after.get(name))
    raise ReducerError(
        f"{reducer.name}: `add` must keep the tensors that `start` made; {name!r} was "
        f"{_described(before.get(name))} and became {_described(after.get(name))}. Change them in place."
    )


def merged(reducer: Reducer, one: State, other: State, documents: Sequence[int]) -> State:
    """The state that the reducer's `merge` returns; `ReducerError` if names, dtypes or numbers of axes change."""
    expected = {name: (value.dtype, value.ndim) for name, value in other.items()}
    together = finite(reducer, reducer.merge(one, other), documents)
    for name in (*expected, *together):
        if name not in together or (together[name].dtype, together[name].ndim) != expected.get(name):
            was, became = (_described(shapes_of(reducer, state).get(name)) for state in (other, together))
            raise ReducerError(
                f"{reducer.name}: `merge` must keep names, dtypes and number of axes; {name!r} was {was} and became "
                f"{became}."
            )
    return together


def _described(shape: tuple[Any, ...] | None) -> str:
    return "absent" if shape is None else f"{shape[1]} {list(shape[0])}"


def finite(reducer: Reducer, state: Any, documents: Sequence[int]) -> State:
    """Returns the state; if it holds NaN, raises an error that names the documents."""
    shapes_of(reducer, state)
    for name, value in state.items():
        # A sum needs no second array; it is also NaN if the state holds both +∞ and −∞.
        if value.is_floating_point() and bool(value.sum().isnan()) and bool(value.isnan().any()):
            first, last = min(documents), max(documents)
            where = f"document {first}" if len(documents) == 1 else f"documents {first} to {last}"
            if type(reducer).__module__.startswith("attnmech."):
                raise ExactnessError(
                    f"{reducer.name}: {name!r} is NaN after {where}, which finite activations never cause. Try "
                    f"dtype=torch.float32, and report it as a bug in attnmech."
                )
            raise ReducerError(
                f"{reducer.name}: {name!r} is NaN after {where}. Leave out what is undefined (padding, rows without a "
                "choice) before summing."
            )
    finite_state: State = state
    return finite_state
