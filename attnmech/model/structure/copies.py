"""Copies models, sharing their parameters, so that the caller's model never changes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...basics.messages import first_line
from ...errors import UnsupportedModelError, WeightsError
from .passes_apart import forget_passes

Model = TypeVar("Model", bound=nn.Module)

_COMPILED: Final = "_orig_mod"  # the attribute by which a wrapper of `torch.compile` holds its module


def copy_of(
    model: Model,
    parameter: Callable[[nn.Parameter], nn.Parameter] = lambda same: same,
    instead: Mapping[int, Any] = MappingProxyType({}),
    device: torch.device | None = None,
) -> Model:
    """A copy of a model in eval mode: modules, config and buffers are copied, parameters are shared. It has forgotten
    the passes of the model, and each of its passes those before.

    `parameter` maps each parameter to the one that the copy holds, by default the same one. `instead` maps the `id` of
    an object to the object that replaces it in the copy. Buffers are moved to `device`, if given.
    """
    shared: dict[int, Any] = {id(weight): parameter(weight) for weight in model.parameters()} | dict(instead)
    for part in model.modules():
        # torch does not copy tensors that are not leaves, such as weights that a pre-hook computes in every pass
        # (prune).
        made = [tensor for tensor in vars(part).values() if isinstance(tensor, torch.Tensor) and not tensor.is_leaf]
        shared |= {id(tensor): tensor.detach() for tensor in made}
    try:
        copied = copy.deepcopy(model, shared)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}), and attnmech never changes the original. "
            "Remove what was attached to it, or load it again from its folder."
        ) from error
    for buffer_owner in copied.modules() if device is not None else ():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            setattr(buffer_owner, name, buffer.to(device))
    copied.eval()
    forget_passes(copied)
    return copied


def uncompiled(model: Model) -> Model:
    """A model; a copy without the wrappers if `torch.compile` has put some around its parts."""
    if not any(hasattr(part, _COMPILED) for part in model.modules()):
        return model
    copied = copy_of(model)
    for path, part in list(copied.named_modules()):
        if isinstance(inner := getattr(part, _COMPILED, None), nn.Module):
            copied.set_submodule(path, inner)
    return copied


def take_apart(model: nn.Module) -> None:
    """Removes hooks and replaced forwards from a copy that is no longer run."""
    for part in model.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        for name in ("forward", "as_used"):
            vars(part).pop(name, None)


def moved(parameter: nn.Parameter, device: torch.device | None, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter on another device or in another precision; the parameter itself if neither changes."""
    device, dtype = device or parameter.device, dtype or parameter.dtype
    if (device, dtype) == (parameter.device, parameter.dtype):
        return parameter
    return nn.Parameter(parameter.detach().to(device=device, dtype=dtype), requires_grad=parameter.requires_grad)


def cannot_run(model: PreTrainedModel, error: Exception) -> WeightsError:
    """The error for a model that transformers itself cannot run in its precision on its device."""
    weights = next(model.parameters())
    kind = str(weights.dtype).removeprefix("torch.")
    if hasattr(model, "cannot_run"):
        return model.cannot_run(error)  # type: ignore[no-any-return, operator]
    hint = "" if weights.dtype == torch.float32 else " Try dtype=torch.float32."
    return WeightsError(
        f"transformers cannot run {type(model).__name__} in {kind} on {weights.device}: "
        f"{first_line(error).rstrip('.')}.{hint}"
    )


def has_own_hooks(model: nn.Module) -> bool:
    """Whether modules have forward hooks besides those by which transformers records outputs."""
    parts = [(part._forward_hooks, part._forward_pre_hooks) for part in model.modules()]
    hooks = [hook for kinds in parts for held in kinds for hook in held.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def use_attention(model: PreTrainedModel, implementation: str, towers: Sequence[str] = ()) -> PreTrainedModel:
    """Sets the attention implementation of a model and its parts (T5's have their own configs), but its `towers`."""
    # A config hands the setting on to the configs inside it.
    parts: list[nn.Module] = [model.base_model.get_submodule(path) for path in towers]
    kept = [(config, config._attn_implementation) for tower in parts for config in _configs(tower)]
    if hasattr(model, "own_attention"):
        model.own_attention(implementation)  # type: ignore[operator]
    for config in _configs(model):
        config._attn_implementation = implementation
    for config, own in kept:
        config._attn_implementation = own
    return model


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    configs = (getattr(part, "config", None) for part in model.modules())
    return [config for config in configs if isinstance(config, PreTrainedConfig)]
