"""Makes a copy of a model forget earlier passes, and gives each text of a batch the rotary tables and the mask that it
has alone.

Modules of transformers keep what earlier passes computed, and compute some rotary tables (dynamic, longrope) from the
longest text of a batch. PaliGemma reads a text in both directions, but beside padding from left to right. In a copy, a
text's output depends only on the text.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...batch import Batch

_ORIGINAL: Final = "original_inv_freq"  # how rotary modules name the buffers of their frequencies for short texts
_LONGEST: Final = "max_seq_len_cached"  # ends attributes with the length of the longest text so far
_OFFSETS: Final = "rope_deltas"  # where models of images keep the offsets of positions of the latest pass

_read_now: ContextVar[Batch | None] = ContextVar("read now", default=None)


@contextmanager
def reading(batch: Batch) -> Iterator[None]:
    """Names the batch that a model reads during the block, for the rotary tables of its texts."""
    token = _read_now.set(batch)
    try:
        yield
    finally:
        _read_now.reset(token)


def forget_passes(model: nn.Module) -> None:
    """Makes each pass of a model start as the first, and compute the rotary tables of each text from its own length."""
    crossed = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for path, module in model.named_modules():
        if getattr(module, _OFFSETS, None) is not None:
            setattr(module, _OFFSETS, None)
        if follows_length(module):
            _shorten(module)
            of_target = crossed and "decoder" in path.split(".")
            module.forward = partial(_by_text, module, type(module).forward, of_target)
        config = getattr(module, "config", None)
        if config is not None and _unmasked_alone(config):
            config.is_causal = False


def _unmasked_alone(config: Any) -> bool:
    """Whether sdpa attention reads a text in both directions if it has no padding, although its mask beside padding is
    causal: it is given no mask, and `use_bidirectional_attention` then decides.
    """
    both_ways = getattr(config, "model_type", "") == "gemma" and getattr(config, "use_bidirectional_attention", False)
    return bool(both_ways) and config._attn_implementation != "eager"


def follows_length(module: nn.Module) -> bool:
    """Whether a module computes rotary tables that depend on the length of a text."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def _shorten(module: nn.Module) -> None:
    """Returns a rotary module to the state in which it was made."""
    for name, original in dict(module.named_buffers(recurse=False)).items():
        if name.endswith(_ORIGINAL):
            setattr(module, name.removesuffix(_ORIGINAL) + "inv_freq", original.clone())
    for name in [name for name in vars(module) if name.endswith(_LONGEST)]:
        setattr(module, name, module.original_max_seq_len)


def _by_text(
    module: nn.Module,
    forward: Callable[..., Any],
    of_target: bool,
    x: Tensor,
    position_ids: Int[Tensor, "*axes text position"],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The rotary tables of a batch, those of each text from its own positions."""

    def tables(places: Tensor) -> Any:
        return _on_a_fresh_copy(module, forward, x, places, *args, **kwargs)

    batch = _read_now.get()
    batch = batch.target if of_target and batch is not None else batch
    if batch is None or position_ids.ndim < 2 or position_ids.shape[-2:] not in (batch.ids[:1].shape, batch.ids.shape):
        return tables(position_ids)
    if position_ids.shape[-2] == 1 and not batch.padded:
        return tables(position_ids)
    places = _places_alone(position_ids, batch)
    ends = places.movedim(-2, 0).flatten(1).amax(dim=1)
    order = ends.argsort(stable=True)
    parts = [tables(places[..., rows, :]) for rows in torch.split(order, list(Counter(ends[order].tolist()).values()))]
    back = order.argsort()
    # Tables are [*axes text position d_rotary]; the texts return to the order of the batch.
    return pytree.tree_map(lambda *of_parts: torch.cat(of_parts, dim=-3).index_select(-3, back), *parts)


def _places_alone(position_ids: Tensor, batch: Batch) -> Tensor:
    """The positions that each text has without padding; at padding, positions of the text."""
    places = position_ids.expand(*position_ids.shape[:-2], len(batch.ids), -1)
    if "position_ids" not in batch.extra:
        places = places - places.gather(-1, batch.begins.expand(places.shape[:-1])[..., None])
    return places.clamp_min(0).minimum(places.masked_fill(~batch.mask, 0).amax(dim=-1, keepdim=True))


def _on_a_fresh_copy(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    fresh = copy.copy(module)
    fresh._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return forward(fresh, *args, **kwargs)
