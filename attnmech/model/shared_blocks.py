"""Which models use one block as several layers (ALBERT)? They are unrolled: each use becomes a block of its own.

Hooks, edits and statistics then see plain layers, whose parameters are the same tensors.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .copies import copy_of

_TEXTS: Final = (2, 7)
_SEED: Final = 37


def unrolled(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that shares blocks between layers, with a block for each layer; any other model as it is.

    All parameters are shared with the model, and between the layers that share them. Raises `UnsupportedModelError` if
    the copy does not return to the last bit what the model does.
    """
    found = [(path, part) for path, part in model.named_modules() if type(part).__name__ in _UNROLLED]
    if not found:
        return model
    copied = copy_of(model)
    for path, part in found:
        _UNROLLED[type(part).__name__](copied.get_submodule(path))
    _require_the_same(model, copied)
    return copied


def _albert(encoder: Any) -> None:
    """Groups of layers, each used for several layers in a row (Lan et al. 2020, section 3.1)."""
    layers, groups = encoder.config.num_hidden_layers, encoder.albert_layer_groups
    of_layer = [groups[int(number / (layers / encoder.config.num_hidden_groups))] for number in range(layers)]
    uses = [layer for group in of_layer for layer in group.albert_layers]
    seen: set[int] = set()
    inner = groups[0].albert_layers
    encoder.albert_layer_groups = nn.ModuleList(
        copy.deepcopy(groups[0], {id(inner): nn.ModuleList([_use(layer, seen)])}) for layer in uses
    )
    # Of the encoder alone: the model's says what its checkpoint holds.
    encoder.config = copy.deepcopy(encoder.config)
    encoder.config.num_hidden_layers = encoder.config.num_hidden_groups = len(uses)
    encoder.config.inner_group_num = 1


_UNROLLED: Final[Mapping[str, Callable[[Any], None]]] = {"AlbertTransformer": _albert}
"""By the class of the module that calls the shared blocks."""


def _use(block: nn.Module, seen: set[int]) -> nn.Module:
    """The block where it is used first, then copies that share its parameters and buffers."""
    if id(block) not in seen:
        seen.add(id(block))
        return block
    return copy.deepcopy(block, {id(each): each for each in (*block.parameters(), *block.buffers())})


@torch.no_grad()
def _require_the_same(model: PreTrainedModel, copied: PreTrainedModel) -> None:
    rows = model.get_input_embeddings().weight  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(len(rows), _TEXTS, generator=generator).to(rows.device)
    try:
        before = _last(copy_of(model).base_model(input_ids=ids))
    except Exception:  # a model that does not run at all is refused where it is run first
        return
    after = _last(copied.base_model(input_ids=ids))
    if not torch.equal(before, after):
        raise UnsupportedModelError(
            f"{type(model).__name__} uses blocks for several layers in an order that attnmech does not know: unrolled, "
            "it returns something else."
        )


def _last(output: Any) -> Tensor:
    found = output.last_hidden_state
    assert isinstance(found, torch.Tensor)
    return found
