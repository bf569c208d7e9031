"""Gives the architecture of a model: from the table of families, or read from the model."""

import inspect
from dataclasses import replace
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from ...basics.messages import first_line
from ...errors import AttnmechError, UnsupportedModelError, WeightsError
from ..parts.modules import has_module
from .architecture import Architecture
from .block_structure import UnreadableError
from .encoder_decoder import StacksReader
from .families import ARCHITECTURES, Config
from .refused import REFUSED
from .signals import KINDS, argument_of, encodes_alone
from .structure import read_structure

_SPARSE: Final = "BigBirdBlockSparseAttention"


def architectures_of(module: nn.Module) -> tuple[Architecture, ...]:
    """The architecture of each stack; raises `UnsupportedModelError`, which says what is unsupported and why."""
    model = require_transformers(module)
    kind = model.config.model_type
    entry = ARCHITECTURES.get(kind)
    if entry is not None:
        plans = entry(model.config)
        stacks = plans if isinstance(plans, tuple) else (plans,)
        there = [plan for plan in stacks if len(stacks) == 1 or has_module(model.base_model, plan.blocks)]
        if len(there) == 1:
            there = [replace(there[0], stack="")]
        return tuple(_with_heads(plan, model.config) for plan in there)
    what = f"{type(model).__name__} (model_type {kind!r})"
    reason = REFUSED.get(kind) or _sparse_blocks(model) or _shared_keys(model) or _needs_more(model)
    if reason:
        raise UnsupportedModelError(f"{what} is not supported: {reason}.")
    crossed = model.config.is_encoder_decoder and not encodes_alone(model)
    if not crossed and (towers := _towers(model)):
        named = " or ".join(f"am.load(model.{tower})" for tower in towers)
        raise UnsupportedModelError(
            f"{what} holds separate models of images (or sound) and text, and reads no text alone; load one: {named}."
        )
    if not attends(model):
        raise UnsupportedModelError(f"{what} is a model without attention.")
    try:
        return StacksReader(model).architectures() if crossed else (read_structure(model),)
    except UnreadableError as error:
        raise UnsupportedModelError(
            f"{what} is not in attnmech's table, and its structure cannot be read: {error}. If you know how it is "
            "built, describe it: am.load(model, architecture=am.Architecture(...))."
        ) from error
    except AttnmechError:
        raise
    except Exception as error:  # a model can be built of anything
        raise UnsupportedModelError(
            f"{what} is not in attnmech's table, and reading its structure fails: {first_line(error)}."
        ) from error


def described(module: nn.Module, plan: Architecture) -> Architecture:
    """The architecture that a user gives; numbers of heads that the user leaves out come from the config."""
    model = require_transformers(module)
    for path in (plan.blocks, plan.final_norm, plan.embed_norm, plan.embed_projection, plan.narrow_norm):
        if path and not has_module(model.base_model, path):
            raise UnsupportedModelError(
                f"`architecture` names a module {path!r}, which {type(model).__name__} does not have."
            )
    return _with_heads(plan, model.config)


def unwrapped(model: nn.Module) -> nn.Module:
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    wrapped = getattr(model, "module" if parallel else "_orig_mod", None)
    return unwrapped(wrapped) if isinstance(wrapped, nn.Module) else model


def require_transformers(model: nn.Module) -> PreTrainedModel:
    """The model without its wrappers; raises `UnsupportedModelError` for any other module."""
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        what = (
            "a module of your own, which needs an example of its inputs: am.load(module, example=x)"
            if attends(model)
            else "a model without attention"
        )
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}, {what}.")
    return model


def _shared_keys(model: nn.Module) -> str:
    """Why a model whose last layers share keys and values is refused; empty for any other model."""
    count = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)  # type: ignore[union-attr, operator]
    if not count:
        return ""
    return f"its last {count} layers have no W_K and W_V of their own: they use the keys and values of an earlier layer"


def _needs_more(model: PreTrainedModel) -> str:
    """Why a tower whose pictures or sounds have sizes of their own is refused; empty for any other model."""
    taken = inspect.signature(model.forward).parameters
    sizes = [name for name in taken if name in ("image_sizes", "feature_lens")] or _needed(model)[1:]
    if "input_ids" in taken or not sizes:
        return ""
    return (
        f"it takes pictures or sounds of different sizes, which {sizes[0]} tells apart; attnmech reads towers whose "
        "inputs all have one size"
    )


def _needed(model: PreTrainedModel) -> list[str]:
    """The inputs without which a model does not run."""
    taken = inspect.signature(model.forward).parameters.values()
    named = (value for value in taken if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD))
    return [value.name for value in named if value.default is value.empty]


def _sparse_blocks(model: PreTrainedModel) -> str:
    """Why a BigBird with sparse attention is refused; its modules decide, which a short text makes full for good."""
    if not any(type(part).__name__ == _SPARSE for part in model.modules()):
        return ""
    return (
        "its attention is sparse (attention_type='block_sparse'): a block of tokens attends to a few other blocks, "
        "some of them chosen at random. The same weights run with full attention: "
        f"am.load(transformers.{type(model).__name__}.from_pretrained(folder, attention_type='original_full'))"
    )


def _with_heads(plan: Architecture, config: Config) -> Architecture:
    heads = plan.n_heads or int(config.num_attention_heads)
    kv_heads = plan.n_kv_heads or int(getattr(config, "num_key_value_heads", None) or heads)
    if heads < 1 or kv_heads < 1:
        raise WeightsError(f"a config must ask for at least one head; this one asks for {heads} ({kv_heads} for keys).")
    if heads % kv_heads:
        raise WeightsError(f"the config's {heads} heads must be a multiple of its {kv_heads} heads of keys and values.")
    # transformers makes a decoder's mask bidirectional by this setting, as in today's embedding models.
    causal = plan.causal and getattr(config, "is_causal", True) is not False
    return replace(plan, n_heads=heads, n_kv_heads=kv_heads, causal=causal)


def _towers(model: PreTrainedModel) -> list[str]:
    """The towers of a model that has one for images or sound and one for text, and no output for a text alone."""
    parts = {name: part for name, part in model.named_children() if isinstance(part, PreTrainedModel)}
    kinds = {name: argument_of(part) for name, part in parts.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind in inspect.signature(parts[name].forward).parameters}
    both = "input_ids" in kinds.values() and bool(KINDS.keys() & set(kinds.values()))
    return list(kinds) if both and (not model.can_generate() or KINDS.keys() & set(_needed(model))) else []


def attends(model: nn.Module) -> bool:
    """Whether a module is or holds attention, by the names of its classes."""
    # MLA: multi-head latent attention (LongCat-Flash).
    names = {type(part).__name__ for part in model.modules()}
    return any("attention" in name.lower() or name.endswith("MLA") for name in names)
