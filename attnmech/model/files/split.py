"""Reads models that are split over devices (accelerate's `device_map`), with all values on one of them.

A module without parts runs where its weights are: its inputs are moved there, and its outputs back. So does a module
that holds weights beside its parts, such as a mixer, unless it attends. Everything else, such as attention and the sums
of the stream, is computed on the model's device, as if all weights were there.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ...basics.messages import first_line
from ...errors import WeightsError
from ...maths.precision import pass_tolerance
from ..parts.weights import HOME
from ..proof.probe import Passes, by_row, excess_of, output_of, with_least
from ..run.wired import call
from ..structure.copies import copy_of, moved
from ..structure.plan import attends

_REMEDY = 'Load it on one device, with device_map={"": "cpu"} or without; dtype="bfloat16" takes half as much memory.'


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that hold a model's parameters, in their order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def without_dispatch(model: PreTrainedModel) -> PreTrainedModel:
    """A model without the hooks with which accelerate moves values between devices, removed in place."""
    if "accelerate" in sys.modules:
        import_module("accelerate.hooks").remove_hook_from_module(model, recurse=True)
    return model


def joined(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a split model, with all values between modules on the device where its parameters begin.

    Parameters are shared, except the few that attention and blocks hold themselves (sinks, factors of norms).
    """
    device, *_ = devices = devices_of(model)
    copied = without_dispatch(copy_of(model))
    copied.cannot_run = partial(_cannot_run, type(model).__name__, devices)  # type: ignore[assignment]
    _join(copied, device)
    return copied


def _join(module: nn.Module, device: torch.device) -> None:
    own = dict(module.named_parameters(recurse=False))
    away = next((parameter.device for parameter in own.values() if parameter.device != device), None)
    if away is not None and (next(module.children(), None) is None or not attends(module)):
        module.forward = partial(_run, module, away)
        setattr(module, HOME, device)
        return
    for name, parameter in own.items():
        setattr(module, name, moved(parameter, device, None))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))
    for part in module.children():
        _join(part, device)


def check_joined(split: PreTrainedModel, passes: Passes) -> None:
    """Raises `WeightsError` unless a split model returns on the probe what its joined copy does."""
    try:
        with torch.no_grad():
            theirs = output_of(call(copy_of(split), passes.batch)).to(passes.plain.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # some models run on one device only (Falcon with ALiBi), and so does the copy
        return
    ours = passes.plain
    limit = pass_tolerance(ours.dtype)
    excess = excess_of(ours, theirs, with_least(by_row(theirs, limit), ours.dtype))
    if not excess <= 1:
        raise WeightsError(
            f"{type(split).__name__} returns one thing split over devices and another with its values on one "
            f"(off by {excess * limit:.1e} of the largest value of a row). {_REMEDY}"
        )


def _cannot_run(kind: str, devices: Sequence[torch.device], error: Exception) -> WeightsError:
    return WeightsError(
        f"{kind} does not run with its weights on {' and '.join(map(str, devices))} and its values on one of them "
        f"({first_line(error).rstrip('.')}). {_REMEDY}"
    )


def _run(module: nn.Module, away: torch.device, *args: Any, **kwargs: Any) -> Any:
    """One call of a module where its weights are."""
    return _to(getattr(module, HOME), type(module).forward(module, *_to(away, args), **_to(away, kwargs)))


def _to(device: torch.device, value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
