"""Merges adapters (`peft`: LoRA and its relatives) into a copy of the layers that they adapt.

LoRA turns a layer x W into x (W + s B A), which is a single matrix; attnmech's points use that matrix as their weights.
The caller's model keeps its adapters; layers without an adapter stay shared with it.
"""

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...basics.messages import first_line
from ...errors import InputError, ModelNotFoundError, UnsupportedModelError, WeightsError
from ...maths.precision import pass_tolerance
from .stored import tensors_in_file

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_NO_WEIGHTS: Final = ("ADAPTION_PROMPT", "XLORA")
"""Kinds of adapters that do not change weights of layers. Adapters that learn prompts do not either."""
_PROBES: Final = 5
_TOKENS: Final = 7
_SEED: Final = 23


def merged(source: nn.Module) -> tuple[nn.Module, str]:
    """A model with its active adapters merged, and a suffix for its name; other modules are returned unchanged."""
    if "peft" not in sys.modules or not (_is_wrapped(source) or any(_adapting(source))):
        return source, ""
    if _is_wrapped(source):
        _require_weights(source)
    inner: Any = source.get_base_model() if _is_wrapped(source) else source  # type: ignore[operator]
    parts = [part for _, part in _adapting(inner)]
    names = ", ".join(repr(name) for name in dict.fromkeys(name for part in parts for name in part.active_adapters))
    used = not any(part.disable_adapters for part in parts)
    if not used and any(getattr(part, "merged", False) for part in parts):
        raise UnsupportedModelError(f"the adapter {names} is merged and switched off; model.unmerge_adapter() first.")
    merged_model = _shared_copy(inner)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # peft warns that embeddings are no longer tied, which does no harm here.
            warnings.simplefilter("ignore")
            for path, part in list(_adapting(merged_model)):
                merged_model.set_submodule(path, _plain(path, part, used))
    except UnsupportedModelError:
        raise
    except Exception as error:  # adapters of peft fail in many ways
        raise UnsupportedModelError(
            f"the adapter {names} cannot be merged into the weights: {first_line(error)}. If peft can merge it, give "
            f"am.load the merged model: model.merge_and_unload()."
        ) from error
    merged_model._hf_peft_config_loaded = False
    _require_same_output(_shared_copy(source), merged_model, names)
    return merged_model, f" with adapter {names} {'merged' if used else 'switched off'}"


def base_of(folder: Path) -> str:
    """The folder or the hub name of the base model that a folder's adapter names."""
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"folder {folder}: its {CONFIG} cannot be read: {first_line(error)}") from error
    if not isinstance(base, str) or not base:
        raise ModelNotFoundError(
            f"folder {folder} holds an adapter that does not name its base model; load both yourself and give am.load "
            "the object: peft.PeftModel.from_pretrained(base, folder)."
        )
    return base


def adapted(model: PreTrainedModel, folder: Path) -> nn.Module:
    """The model with a folder's adapter, not yet merged; raises `WeightsError` if the two do not belong together."""
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise InputError(
            f"folder {folder} holds an adapter, which peft reads: pip install 'attnmech[peft]'."
        ) from error
    if not (folder / WEIGHTS).is_file():
        raise ModelNotFoundError(f"folder {folder} has an {CONFIG}, but no {WEIGHTS} (other files may run code).")
    stored = tensors_in_file(folder / WEIGHTS)
    try:
        with warnings.catch_warnings():
            # peft warns of missing weights; the check below refuses them.
            warnings.simplefilter("ignore")
            with_adapter: nn.Module = peft.PeftModel.from_pretrained(model, str(folder), torch_device=str(model.device))
        wanted = peft.get_peft_model_state_dict(with_adapter)
    except Exception as error:  # a config can hold anything
        raise WeightsError(
            f"folder {folder}: its adapter does not fit {type(model).__name__}: {first_line(error)}"
        ) from error
    for names, verb in ((wanted.keys() - stored.keys(), "lacks"), (stored.keys() - wanted.keys(), "has no place for")):
        if names:
            what = "its adapter" if verb == "lacks" else type(model).__name__
            raise WeightsError(
                f"folder {folder}: {what} {verb} {len(names)} of the adapter's weights, including {min(names)}."
            )
    return with_adapter


def _is_wrapped(source: nn.Module) -> bool:
    return "peft" in sys.modules and isinstance(source, sys.modules["peft"].PeftModel)


def _require_weights(source: Any) -> None:
    for name, config in source.peft_config.items():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if config.is_prompt_learning or kind in _NO_WEIGHTS:
            raise UnsupportedModelError(
                f"the adapter {name!r} ({kind}) does not change weights: it adds learned tokens, or another model. "
                f"LoRA, DoRA, IA³ and others that peft can merge are supported; source.get_base_model() is the "
                "model without it."
            )


def _adapting(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost adapter modules that replace a layer of the model, by path."""
    layers, whole = import_module("peft.tuners.tuners_utils"), import_module("peft.utils.other")
    kinds = layers.BaseTunerLayer, whole.AuxiliaryTrainingWrapper
    inside = "\0"
    for path, part in model.named_modules():
        if isinstance(part, kinds) and not path.startswith(inside):
            inside = f"{path}."
            yield path, part


def _shared_copy(model: nn.Module) -> Any:
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()


def _plain(path: str, part: Any, used: bool) -> nn.Module:
    """The layer without its adapter, which is merged into the layer if it is in use."""
    if hasattr(part, "original_module"):
        _own_weights(part.original_module)
        if not used:
            return part.original_module  # type: ignore[no-any-return]
        whole: nn.Module = part.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        return whole
    base: nn.Module = part.get_base_layer()
    _own_weights(base)
    if part.merged or not used:
        return base
    x = _probe(base)
    if x is None:
        raise UnsupportedModelError(
            f"{path} is a {type(base).__name__} with an adapter; attnmech merges those of linear layers, "
            "convolutions and embeddings. Give am.load the merged model: model.merge_and_unload()."
        )
    before = part(x)
    part.merge(safe_merge=True)
    _require_same(f"the adapter at {path}", before, base(x))
    return base


def _own_weights(base: nn.Module) -> None:
    """Copies the weights of a layer, which may be shared with the caller's model and with tied layers."""
    for owner in base.modules():
        for name, value in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))


def _probe(base: nn.Module) -> Tensor | None:
    """Random inputs for a layer; None if the form of its inputs is unknown."""
    generator, weight = torch.Generator().manual_seed(_SEED), next(base.parameters())
    if isinstance(base, nn.Embedding):
        return torch.randint(base.num_embeddings, (_PROBES,), generator=generator).to(weight.device)
    if isinstance(base, nn.Conv1d | nn.Conv2d):
        shape = [_PROBES, base.in_channels, *(2 * size for size in weight.shape[2:])]
    elif isinstance(base, nn.Linear | Conv1D):
        shape = [_PROBES, weight.shape[0 if isinstance(base, Conv1D) else 1]]
    else:
        return None
    return torch.randn(shape, generator=generator).to(weight)


def _require_same_output(before: Any, after: Any, names: str) -> None:
    """Compares the outputs of whole models that read tokens: peft may change more than the layers that it replaces."""
    if getattr(after, "main_input_name", "") != "input_ids":
        return
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(len(after.get_input_embeddings().weight), (2, _TOKENS), generator=generator).to(after.device)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if after.config.is_encoder_decoder else {})
    with torch.no_grad():
        first, second = (model(**inputs, use_cache=False)[0] for model in (before, after))
    _require_same(f"the adapter {names}", first, second)


def _require_same(what: str, before: Tensor, after: Tensor) -> None:
    limit = pass_tolerance(after.dtype) * float(before.abs().max())
    if not float((before - after).abs().max()) <= limit:
        raise UnsupportedModelError(
            f"{what} does not compute what the merged weights compute, so attnmech cannot read it exactly."
        )
