"""Makes a probe longer than every window, and than every length at which a model's code branches.

Past a window of 4,096 tokens, a pass through all layers would take too long, so this probe runs one block of each kind.
If rotary tables depend on the length, the batch holds a short text too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...batch import Batch
from ..parts.modules import first_tensor, submodule
from ..run.hooked import HookedModel
from ..run.wired import call
from ..stack.skipping import alone
from ..stack.stack import Stack
from ..structure.signals import below_head
from .texts import LONG, texts_of

_WINDOWS: Final = (
    "sliding_window", "sliding_window_size", "window_size", "local_attention", "attention_chunk_size",
    "attention_window_size", "local_attention_window_len",
)  # fmt: skip
"""The names in configs for the number of keys that a query sees."""
_BEYOND: Final = 24  # the probe reaches past the last branch by this many tokens
_FARTHEST: Final = 2**13  # longer texts are not probed, since attention grows with the square of the length
_BLOCKS: Final = 3  # the far probe runs at most this many blocks


def far_batch(model: HookedModel, short: int) -> Batch | None:
    """A text long enough to pass every branch of a model's code; None if the other probes suffice.

    If a branch depends on the length of texts, a text of `short` tokens follows, padded on the right.
    """
    limit, config = model.architecture.position_limit, model.config.get_text_config()
    turns = list(_turns(config))
    windows = [window for name in _WINDOWS if isinstance(window := getattr(config, name, None), int)]
    branches = [place for place in (*windows, *turns) if limit is None or place < limit]
    branches = [place for place in branches if place <= _FARTHEST and (place in turns or place >= LONG)]
    if not branches or not model.writes_tokens or model.is_own or len(model.stacks) > 1:
        return None
    length = max(branches) + _BEYOND
    length = length if limit is None else min(length, limit)
    return texts_of(model, [length, short] if turns else [length])


def _turns(config: Any) -> Iterator[int]:
    """The lengths of texts beyond which a model's rotation changes."""
    stated = getattr(config, "rope_parameters", None) or {}
    for parameters in (stated, *stated.values()):  # some configs have a rotation for each kind of layer
        kind = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if kind == "longrope":
            yield int(parameters["original_max_position_embeddings"])
        elif kind == "dynamic":
            yield int(config.max_position_embeddings)


def one_of_each_kind(config: Any, layers: Sequence[int]) -> list[int]:
    """The first layer of each kind that a config names; the first layer if all are alike."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if not kinds:
        return [layers[0]]
    first = {kinds[layer]: layer for layer in reversed(layers) if layer < len(kinds)}
    return sorted(first.values())[:_BLOCKS]


def plain_block(model: HookedModel, stack: Stack, layer: int, batch: Batch) -> Float[Tensor, "batch position d_model"]:
    """The output of one block of plain transformers on the embeddings; attnmech's blocks must have run before."""
    blocks = submodule(model.plain.base_model, stack.architecture.blocks)
    assert isinstance(blocks, nn.ModuleList)
    ended: list[Tensor] = []
    hook = blocks[layer].register_forward_hook(lambda module, args, output: ended.append(first_tensor(output)))
    with hook, torch.no_grad(), alone(stack, layer, blocks):
        call(below_head(model.plain), batch)
    (stream,) = ended
    return stream
