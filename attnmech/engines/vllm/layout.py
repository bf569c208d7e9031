"""Where keys and values lie in vLLM's paged cache, measured by writing numbers and finding them again.

The layout differs by backend and processor (a CPU packs keys transposed), so it is not assumed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError

_BASE = 128  # numbers are written digit by digit; integers up to this are exact in 16 bits


@dataclass(frozen=True)
class Paged:
    """Keys or values in a paged cache."""

    blocks: Float[Tensor, "block ..."]
    index: Int[Tensor, "slot kv_head d"]  # the place of each number in its block, in the order of its axes
    view: Float[Tensor, "kv_head block slot d"] | None  # the same as a view of the cache, if places follow from strides

    @classmethod
    def of(cls, blocks: Tensor, index: Int[Tensor, "slot kv_head d"]) -> "Paged":
        """Finds out whether a view can read the cache."""
        sizes, strides = blocks.shape[1:], blocks.stride()[1:]
        at = sum(place * stride for place, stride in zip(torch.unravel_index(index, sizes), strides, strict=True))
        assert isinstance(at, Tensor)
        first = int(at[0, 0, 0])
        steps = [int(at.select(axis, 1).flatten()[0]) - first if at.shape[axis] > 1 else 1 for axis in range(3)]
        counts = [torch.arange(size, device=at.device) * step for size, step in zip(at.shape, steps, strict=True)]
        if not torch.equal(at, first + counts[0][:, None, None] + counts[1][:, None] + counts[2]):
            return cls(blocks, index, None)
        shape, stride = (len(blocks), *at.shape), (blocks.stride(0), *steps)
        return cls(blocks, index, blocks.as_strided(shape, stride, blocks.storage_offset() + first).permute(2, 0, 1, 3))

    def read(
        self, table: Int[Tensor, "request block"], positions: Int[Tensor, "request key"]
    ) -> Float[Tensor, "kv_head request key d"]:
        """The entries at these positions of each request; `table` holds the request's blocks."""
        size = len(self.index)
        block, slot = positions // size, positions % size
        if self.view is not None:
            return self.view[:, table.gather(1, block), slot]
        read = self.blocks[table[:, : int(block.max()) + 1]].flatten(2)[..., self.index]
        return read[torch.arange(len(read), device=read.device)[:, None], block, slot].permute(2, 0, 1, 3)


def layout_of(layer: Any, blocks: int) -> tuple[Paged, Paged]:
    """The keys and the values of one of vLLM's attention layers, in an engine with this number of blocks.

    Raises `InputError` for a cache whose numbers cannot be found again, such as a quantised one.
    """
    cache: Tensor = layer.kv_cache
    # A kernel may count each of the engine's blocks as several.
    axes = sorted(range(cache.ndim), key=lambda axis: (cache.shape[axis] != blocks, cache.shape[axis] % blocks != 0))
    of_blocks = cache.movedim(axes[0], 0)
    if len(of_blocks) % blocks:
        raise InputError(f"the cache of {layer.layer_name} must have an axis of {blocks} blocks; got {cache.shape}.")
    widths = layer.head_size, layer.head_size_v
    size = of_blocks[0].numel() // (layer.num_kv_heads * sum(widths))
    scratch = torch.empty_like(cache.narrow(axes[0], 0, 2))
    slots = torch.arange(size, 2 * size, device=cache.device)
    written = [torch.full((size, layer.num_kv_heads, width), -1.0, device=cache.device) for width in widths]
    paged = []
    for place, width in enumerate(widths):
        numbers = torch.arange(size * layer.num_kv_heads * width, device=cache.device)
        digits, power = torch.zeros_like(of_blocks[0], dtype=torch.long).flatten(), 1
        there = torch.ones_like(digits, dtype=torch.bool)
        while power <= len(numbers):
            scratch.fill_(-1.0)
            pair = list(written)
            pair[place] = (numbers // power % _BASE).view(size, layer.num_kv_heads, width)
            layer.impl.do_kv_cache_update(layer, *(one.to(cache.dtype) for one in pair), scratch, slots)
            read = scratch.movedim(axes[0], 0)[1].flatten().float()
            there &= read >= 0
            digits += read.clamp_min(0).long() * power
            power *= _BASE
        at = there.nonzero()[:, 0]
        order = digits[at].argsort()
        if len(at) != len(numbers) or not torch.equal(digits[at][order], numbers):
            raise InputError(
                f"the cache of {layer.layer_name} ({cache.dtype}) does not give back the numbers that are written to "
                'it, as in quantised caches; serve with kv_cache_dtype="auto".'
            )
        paged.append(Paged.of(of_blocks, at[order].view(size, layer.num_kv_heads, width)))
    return paged[0], paged[1]
