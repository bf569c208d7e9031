"""Computes the derivative of a function of the logits with respect to points."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...activations.activations import Activations
from ...basics.arguments import shown
from ...basics.messages import first_line
from ...batch import Batch
from ...errors import InputError
from ...points import PointKey
from ..attention.in_force import Pass
from .wired import WiredModel

Measure = Callable[..., Tensor]  # `f(logits)` or `f(logits, batch)` -> one number, or one per sequence


def run_with_gradients(model: WiredModel, batch: Batch, keys: Sequence[PointKey], measure: Measure) -> Activations:
    """The values at the points, with d(Σ measure)/d(value) in `.gradients`; 0 if the measure does not depend on it."""
    batch = batch.differentiable
    wanted = Pass(batch, frozenset(keys), gradients=True)
    with torch.enable_grad(), _naming_undifferentiable():
        logits = model._run_pass(wanted)
        if logits is None:
            raise InputError("gradients_of needs logits; this model was loaded without a head on top.")
        value = _measured(measure, logits, batch)
        values = [wanted.values[key] for key in keys]
        gradients = torch.autograd.grad(value.sum(), values, allow_unused=True, materialize_grads=True)
    return Activations(
        batch,
        {key: value.detach() for key, value in zip(keys, values, strict=True)},
        Activations(batch, dict(zip(keys, gradients, strict=True))),
        unchecked=wanted.skipped,
    )


@contextmanager
def _naming_undifferentiable() -> Iterator[None]:
    """Raises `InputError` for tensors made in inference mode, or changed in place."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise InputError(
                "a metric, hook or intervention changes in place a tensor that its own gradient needs; use steps such "
                f"as x * 2 instead of x.mul_(2) ({first_line(error)})."
            ) from error
        if "nference tensor" not in str(error):
            raise
        raise InputError(
            "gradients cannot pass tensors made within torch.inference_mode(): the model's parameters, or tensors of a "
            "hook or an intervention. Make them outside it (tensor.clone() suffices), or use torch.no_grad()."
        ) from error


def _measured(measure: Measure, logits: Tensor, batch: Batch) -> Tensor:
    arguments = (logits, batch) if _wants_batch(measure) else (logits,)
    try:
        inspect.signature(measure).bind(*arguments)
    except TypeError as error:
        raise InputError(f"gradients_of must be a function (logits) or (logits, batch): {error}.") from error
    except ValueError:  # builtins may have no signature
        pass
    value = measure(*arguments)
    if not isinstance(value, torch.Tensor) or value.ndim > 1 or not value.requires_grad or value.is_complex():
        raise InputError(
            "gradients_of must return a tensor computed from the logits, one number or one per sequence; got "
            f"{shown(value)}."
        )
    return value


def _wants_batch(measure: Measure) -> bool:
    """Whether a function has a second required argument."""
    try:
        parameters = inspect.signature(measure).parameters.values()
    except (TypeError, ValueError):  # builtins may have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters) >= 2
