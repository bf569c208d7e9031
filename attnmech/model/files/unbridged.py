"""Rebuilds the transformers model inside a TransformerLens bridge, whose modules bridging rewrote in place.

The model is built again from its class and config, with the parameters that the bridge's components use: the trained
ones or, for a bridge in compatibility mode, the processed ones. Passes over probe tokens then compare it with the
bridge, both with the bridge's `original_model` and with the bridge's own forward pass.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...basics.messages import first_line
from ...batch import Batch
from ...errors import UnsupportedModelError, WeightsError
from ...maths.float64 import float64_device
from ...maths.precision import pass_tolerance
from ..parts.packed import require_unquantised
from ..proof.probe import Passes, by_row, excess_of, output_of, with_least
from ..run.wired import call
from ..structure.copies import copy_of
from ..structure.passes_apart import forget_passes
from ..structure.signals import KINDS

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_REMEDY: Final = "Load the transformers model before it is bridged, or its folder."
_BEFORE_BRIDGES: Final = ("HookedTransformer", "HookedEncoder", "HookedEncoderDecoder", "HookedAudioEncoder")
"""The model classes of TransformerLens before version 4."""


@dataclass(frozen=True, eq=False)
class Unbridged:
    """The model inside a bridge."""

    bridged: PreTrainedModel  # the transformers model whose modules the bridge replaced
    bridge: "TransformerBridge | None"  # the bridge; None if only its `original_model` is known

    @property
    def tokenizer(self) -> Any:
        return None if self.bridge is None else self.bridge.tokenizer

    @cached_property
    def model(self) -> PreTrainedModel:
        """A model of the same class, which shares the parameters that the bridge uses."""
        return _rebuilt(self.bridged)

    def check(self, passes: Passes) -> None:
        """Raises `WeightsError` unless the bridge computes the logits of the loaded model on the probe tokens.

        The comparison leaves out a user's hooks, which may change anything.
        """
        without_hooks = _without_hooks(self.bridged if self.bridge is None else self.bridge)
        inner: Any = without_hooks if self.bridge is None else without_hooks.original_model
        batch = _moved(passes.batch, next(self.model.parameters()))
        label = passes.model.output_stack.label
        self._compare("its logits", lambda: output_of(call(inner, batch)), batch, label)
        whole = batch.mask.all(dim=1)
        whole = whole if batch.target is None else whole & batch.target.mask.all(dim=1)
        text = batch.texts(whole.nonzero()[0].cpu())  # the first without padding
        if self.bridge is not None and passes.model.points["logits"].absent is None:
            self._compare("the logits of its own forward pass", lambda: _forward(without_hooks, text), text, label)

    def _compare(self, name: str, run: Callable[[], Tensor], batch: Batch, label: str) -> None:
        """Raises `WeightsError` unless what `run` returns equals the loaded model's output for the batch."""
        with torch.no_grad():
            try:
                theirs = run()
            except Exception as error:  # whatever TransformerLens's components raise
                raise _unlike(self.bridged, f"the bridge does not run: {first_line(error)}") from error
            ours = output_of(call(self.model, batch))
        if theirs.shape != ours.shape:
            raise _unlike(self.bridged, f"{name} have the shape {tuple(theirs.shape)}, not {tuple(ours.shape)}")
        limit = pass_tolerance(ours.dtype)
        keep = batch.queries(label).mask
        keep = keep if ours.shape[:2] == keep.shape else torch.ones_like(ours, dtype=torch.bool)
        excess = excess_of(ours, theirs, with_least(by_row(ours, limit), ours.dtype), keep)
        if not excess <= 1:
            raise _unlike(self.bridged, f"{name} differ by {excess * limit:.1e} of the largest of a row")


def unbridged(source: nn.Module) -> Unbridged | None:
    """The model inside a `TransformerBridge`, or inside its `original_model`; None for any other module.

    Raises `UnsupportedModelError` for a bridge of a model that is not one of transformers, for parts of a bridge, and
    for models of TransformerLens before version 4.
    """
    for kind in type(source).__mro__:
        if kind.__name__ in _BEFORE_BRIDGES:
            raise UnsupportedModelError(
                f"expected a transformers model or a TransformerBridge; got {kind.__name__}, a model of "
                'TransformerLens before version 4. Load the original weights: am.load("gpt2"), a folder, '
                "or am.load(hf_model, tokenizer=tokenizer)."
            )
    if "transformer_lens.model_bridge" not in sys.modules:
        return None  # no bridge can exist, and the import would take seconds
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    bridge = source if isinstance(source, TransformerBridge) else None
    bridged: Any = source if bridge is None else getattr(bridge, "original_model", None)
    if bridge is not None and not isinstance(bridged, PreTrainedModel):
        raise UnsupportedModelError(
            f"the bridge must hold a transformers model; it holds {type(bridged).__name__}. Bridge one with "
            "TransformerBridge.boot_transformers(...)."
        )
    if isinstance(source, GeneralizedComponent):
        raise UnsupportedModelError(
            f"expected a model; got {type(source).__name__}, a part of a TransformerLens bridge. Load the whole "
            f"bridge: am.load(bridge)."
        )
    if isinstance(bridged, PreTrainedModel):
        if any(isinstance(part, GeneralizedComponent) for part in bridged.modules()):
            return Unbridged(bridged, bridge)
        if bridge is not None:
            raise UnsupportedModelError(
                f"the bridge's original_model is a {type(bridged).__name__} without the bridge's components, so the "
                "two are different models. Load the one you mean: am.load(bridge.original_model), or a new bridge."
            )
    return None


def _unlike(bridged: PreTrainedModel, what: str) -> WeightsError:
    return WeightsError(
        f"the bridge does not compute what {type(bridged).__name__} computes with its weights ({what}): they were "
        f"processed or changed in a way that this class cannot express. {_REMEDY}"
    )


def _rebuilt(bridged: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and config, with the parameters of the bridge's components and copies of buffers."""
    kind = type(bridged)
    require_unquantised(bridged.config, kind.__name__)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind(copy.deepcopy(bridged.config))
    except Exception as error:  # a user's own class may need any arguments
        raise UnsupportedModelError(
            f"the {kind.__name__} in the bridge cannot be built again from its config: {first_line(error)}. {_REMEDY}"
        ) from error
    joined: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        component, original = _at(bridged, path)
        if type(original) is not type(module):
            raise UnsupportedModelError(
                f"the bridge holds {type(original).__name__} at {path!r}, where {kind.__name__} has "
                f"{type(module).__name__}. {_REMEDY}"
            )
        _share(module, original)
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, getattr(original, name))
        joined |= {f"{path}.{name}": weight for name, weight in _joined(component).items()}
    for path, weight in joined.items():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, weight)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False
    model.eval()  # type: ignore[no-untyped-call]
    forget_passes(model)
    return model


def _share(module: nn.Module, original: nn.Module) -> None:
    """Gives a module the parameters of another, and copies of its buffers."""
    # In a bridge, a head without bias has a buffer of zeros in its place, which processing fills.
    added = {name: value for name, value in original._buffers.items() if name in module._parameters}
    biases = {
        name: nn.Parameter(value, requires_grad=False)
        for name, value in added.items()
        if value is not None and value.any()
    }
    module._parameters = {**dict.fromkeys(added), **original._parameters, **biases}
    module._buffers = {
        name: None if value is None else value.clone() for name, value in original._buffers.items() if name not in added
    }


def _at(bridged: nn.Module, path: str) -> tuple[nn.Module | None, Any]:
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    component: nn.Module | None = None
    module: Any = bridged
    for name in path.split(".") if path else ():
        component, module = None, getattr(module, name, None)
        while isinstance(module, GeneralizedComponent):
            component, module = module, module.original_component
    return component, module


def _joined(component: nn.Module | None) -> dict[str, nn.Parameter]:
    """The fused weights of a q, k, v layer that a component has split, if the parts have been changed since.

    The component computes with the parts, and leaves the fused layer unchanged. Splitting a layer with the weights 0,
    1, 2, … shows where each entry of a part belongs.
    """
    from transformer_lens.model_bridge.generalized_components import JointQKVAttentionBridge

    if not isinstance(component, JointQKVAttentionBridge) or "qkv" not in component.submodules:
        return {}
    attention: Any = component.original_component
    name = component.submodules["qkv"].name
    whole: Any = component.submodules["qkv"].original_component
    parts: list[Any] = [part.original_component for part in (component.q, component.k, component.v)]
    # TransformerLens initialises the layers that a split makes; this must not advance the caller's random generator.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = component.split_qkv_matrix(attention)
        if all(_equal(part, earlier) for part, earlier in zip(parts, before, strict=True)):
            return {}
        numbered = _with(whole, _parameters={key: _places(value) for key, value in whole._parameters.items()})
        places = component.split_qkv_matrix(_with(attention, _modules={**attention._modules, name: numbered}))
        return {
            f"{name}.{key}": _filled(value, [getattr(x, key) for x in places], [getattr(x, key) for x in parts])
            for key, value in whole._parameters.items()
            if value is not None
        }


def _equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


def _with(module: nn.Module, **changed: Any) -> nn.Module:
    copied = copy.copy(module)
    vars(copied).update(changed)
    return copied


def _places(value: Tensor | None) -> nn.Parameter | None:
    """A parameter of the shape of a tensor, filled with 0, 1, 2, …"""
    if value is None:
        return None
    numbers = torch.arange(value.numel(), dtype=torch.float64, device=float64_device(value.device))
    return nn.Parameter(numbers.view(value.shape), requires_grad=False)


def _filled(like: Tensor, places: Sequence[Tensor], values: Sequence[Tensor]) -> nn.Parameter:
    numbers = torch.full_like(like, torch.nan).flatten()
    for place, value in zip(places, values, strict=True):
        numbers[place.long().flatten()] = value.to(like.dtype).flatten()
    return nn.Parameter(numbers.view(like.shape), requires_grad=like.requires_grad)


def _moved(batch: Batch, weight: Tensor) -> Batch:
    """A batch on the device of a weight, with real numbers in its precision."""
    extra = {name: x.to(weight if x.is_floating_point() else weight.device) for name, x in batch.extra.items()}
    target = None if batch.target is None else _moved(batch.target, weight)
    return replace(
        batch, ids=batch.ids.to(weight.device), mask=batch.mask.to(weight.device), target=target, extra=extra
    )


def _forward(bridge: "TransformerBridge", batch: Batch) -> Tensor:
    """A bridge's own output for texts without padding."""
    inputs: dict[str, Any] = {**batch.extra}
    if batch.target is not None:
        inputs["decoder_input_ids"] = batch.target.ids
    signal = next((inputs.pop(name) for name in KINDS if name in inputs), None)
    logits = bridge(batch.ids if signal is None else signal, **inputs)
    if not isinstance(logits, Tensor):
        raise TypeError(f"its forward pass returns a {type(logits).__name__} instead of logits")
    return logits


def _without_hooks(model: Any) -> Any:
    """A copy of a bridge or of its `original_model` that shares the parameters, without a user's hooks."""
    from transformer_lens.hook_points import HookPoint

    parts = {id(part): part for part in (*model.modules(), *getattr(model, "original_model", model).modules())}.values()
    instead: dict[int, Any] = {id(part): HookPoint() for part in parts if isinstance(part, HookPoint)}  # type: ignore[no-untyped-call]
    instead |= {id(weight): weight for part in parts for weight in part.parameters(recurse=False)}
    instead[id(getattr(model, "tokenizer", None))] = getattr(model, "tokenizer", None)
    return copy_of(model, instead=instead)
