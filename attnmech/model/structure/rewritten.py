"""Rewrites some models before they are read, so that every layer is a separate block with plain projections.

ALBERT uses one block as several layers; here, each use becomes a separate block. GPT-NeoX-Japanese keeps the bias of
its last W_O outside the projection; here, it becomes the projection's bias. Towers multiply what a block adds to the
stream by parameters of the block (BEiT, InternVL); here, modules multiply it. Parameters stay the same tensors.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ...maths.precision import pass_tolerance
from .copies import copy_of

_TEXTS: Final = (2, 7)
_SEED: Final = 37


def rewritten(model: PreTrainedModel) -> PreTrainedModel:
    """A rewritten copy of a model; a model of any other family unchanged.

    The copy shares all parameters with the model; layers that share parameters still share them. Raises
    `UnsupportedModelError` if the copy does not return what the model returns.
    """
    parts = [(path, part) for path, part in model.named_modules() if type(part).__name__ in _REWRITTEN]
    scaled = [path for path, part in model.named_modules() if _layer_scales_of(part)]
    if not parts and not scaled:
        return model
    copied = copy_of(model)
    for path, part in parts:
        _REWRITTEN[type(part).__name__](copied.get_submodule(path))
    for path in scaled:
        block = copied.get_submodule(path)
        for name, weight in _layer_scales_of(block).items():
            delattr(block, name)
            setattr(block, name, _LayerScale(weight))  # the block's own code then calls it
    if parts:
        _require_the_same(model, copied)
    return copied


def _albert(encoder: Any) -> None:
    """Unrolls groups of layers: one group serves as several layers in a row (Lan et al. 2020, section 3.1)."""
    layers, groups = encoder.config.num_hidden_layers, encoder.albert_layer_groups
    of_layer = [groups[int(number / (layers / encoder.config.num_hidden_groups))] for number in range(layers)]
    uses = [layer for group in of_layer for layer in group.albert_layers]
    seen: set[int] = set()
    inner = groups[0].albert_layers
    encoder.albert_layer_groups = nn.ModuleList(
        copy.deepcopy(groups[0], {id(inner): nn.ModuleList([_use(layer, seen)])}) for layer in uses
    )
    # Only the encoder's config changes: the model's describes its checkpoint.
    encoder.config = copy.deepcopy(encoder.config)
    encoder.config.num_hidden_layers = encoder.config.num_hidden_groups = len(uses)
    encoder.config.inner_group_num = 1


def _gpt_neox_japanese(attention: Any) -> None:
    """Makes the bias that the block adds to attn_raw the b_O of its projection."""
    attention.dense.bias, attention.dense_bias = attention.dense_bias, None


class _LayerScale(nn.Module):
    """Multiplies each dimension of what a block adds to the stream by a number."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, added: Tensor) -> Tensor:
        return self.weight * added

    __mul__ = nn.Module.__call__


def _layer_scales_of(block: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by which a block multiplies what attention and MLP add to the stream."""
    return {name: weight for name, weight in block.named_parameters(recurse=False) if name in ("lambda_1", "lambda_2")}


_REWRITTEN: Final[Mapping[str, Callable[[Any], None]]] = {
    "AlbertTransformer": _albert,
    "GPTNeoXJapaneseAttention": _gpt_neox_japanese,
}
"""The function that rewrites a module, by the name of the module's class."""


def _use(block: nn.Module, seen: set[int]) -> nn.Module:
    """The block itself at its first use; at later uses, a copy that shares its parameters and buffers."""
    if id(block) not in seen:
        seen.add(id(block))
        return block
    return copy.deepcopy(block, {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())})


@torch.no_grad()
def _require_the_same(model: PreTrainedModel, copied: PreTrainedModel) -> None:
    rows = model.get_input_embeddings().weight
    assert isinstance(rows, torch.Tensor)
    ids = torch.randint(len(rows), _TEXTS, generator=torch.Generator().manual_seed(_SEED)).to(rows.device)
    try:
        before = _last(copy_of(model).base_model(input_ids=ids))
    except Exception:  # a model that does not run at all is refused at its first pass
        return
    after = _last(copied.base_model(input_ids=ids))
    if not float((before - after).abs().amax()) <= pass_tolerance(before.dtype) * float(before.abs().amax()):
        raise UnsupportedModelError(
            f"{type(model).__name__} uses its blocks in an unknown way: with one block per layer, its output changes."
        )


def _last(output: Any) -> Tensor:
    stream = output.last_hidden_state
    assert isinstance(stream, torch.Tensor)
    return stream
