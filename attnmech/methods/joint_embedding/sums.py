"""Measures the joint embeddings of a batch in one pass, layer by layer.

A layer's heads are measured after its last block of rows. All numbers are computed over all tokens of the batch.
Afterwards only the sampled tokens' vectors are stored, so the layer's memory is free for the next layer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from ...batch import Batch
from ...maths.float64 import as_float64
from ...model.attention.local_global import local_half
from ...model.attention.observed import RowBlock
from ...model.parts.mask import MaskRule
from .embedded_head import EmbeddedHead, OneHead, Plan
from .token_pairs import Pairs, Tokens, visible_pairs

Found = TypeVar("Found")


def in_threads(measure: Callable[[int], Found], count: int) -> list[Found]:
    """Returns the results of `measure` for 0, 1, …, `count` − 1, in order.

    `measure` must not change shared state or draw random numbers. Nested threads of torch would wait for one another,
    which takes three times as long on two cores.

    >>> in_threads(lambda number: number**2, 4)
    [0, 1, 4, 9]
    """
    threads = torch.get_num_threads()
    if min(threads, count) < 2:
        return [measure(number) for number in range(count)]
    try:
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads, initializer=_alone) as pool:
            return list(pool.map(measure, range(count)))
    finally:
        torch.set_num_threads(threads)  # new threads inherit this number


def _alone() -> None:
    """Limits this thread's calls to one thread; torch and OpenMP store that number per thread."""
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="openmp")


ROWS: Final = 512
"""The largest number of evenly spaced rows of each text in which `shift_share` and `attention_change` are measured."""


class Embedder:
    """Observes one pass over a batch (`HookedModel.forward`)."""

    def __init__(
        self, plan: Plan, batch: Batch, places: Int[Tensor, " sample"], carried: Sequence[int], stack: str
    ) -> None:
        self.plan, self.batch, self.stack = plan, batch, stack
        self.tokens, self.places = Tokens.of(batch), places
        self.sample = self.tokens.chosen(places)
        self.embedded: list[EmbeddedHead] = []
        self.pairs: dict[int, Pairs] = {}
        """The pairs of sampled tokens by layer."""
        self.all_pairs: dict[int, Pairs] = {}
        count = len(plan.heads)
        self.highest = torch.full((count, len(places), 2), -1, dtype=torch.long)
        self.weights = torch.zeros(count, len(places), 2)
        lengths = batch.mask.sum(dim=1).tolist()
        self.patterns = {
            text: torch.zeros(count, lengths[text], lengths[text], dtype=torch.float16) for text in carried
        }
        self.sink = False
        self._layers: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        """The queries of each block of a layer's rows, and the attention to first tokens."""

    def __call__(self, block: RowBlock) -> None:
        """Receives a block of rows; after a layer's last block, measures its heads."""
        heads = [head for layer, head in self.plan.heads if layer == block.layer]
        start = self.plan.heads.index((block.layer, heads[0]))
        places = slice(start, start + len(heads))
        self.sink = self.sink or block.sink is not None
        # Keys that are not tokens do not become points.
        pattern = block.pattern[:, heads, :, : block.mask.queries]
        self._note_highest(pattern, block, places)
        q = local_half(block.q[:, heads], block.mask).clone()
        self._layers[block.layer].append((q, self._on_first(pattern, block)))
        self._keep_patterns(pattern, block, places)
        if block.rows.stop == self.batch.ids.shape[1]:
            self._measure(heads, block)

    def _note_highest(self, pattern: Tensor, block: RowBlock, places: slice) -> None:
        """Notes the two most attended keys of the sampled queries in the block's rows, by position in the batch."""
        position = self.sample.position
        here = ((position >= block.rows.start) & (position < block.rows.stop)).nonzero()[:, 0]
        rows = pattern[self.sample.text[here], :, position[here] - block.rows.start]
        two_highest = rows.topk(min(2, rows.shape[-1]), dim=-1)
        keys = two_highest.indices.masked_fill(two_highest.values == 0, -1)
        for kept, value in ((self.highest, keys), (self.weights, two_highest.values)):
            kept[places, here, : value.shape[-1]] = rearrange(value, "token head two -> head token two").to(kept)

    def _on_first(self, pattern: Tensor, block: RowBlock) -> Float[Tensor, " head"]:
        first = self.batch.begins
        inside = first.clamp_max(pattern.shape[-1] - 1)
        on_first = pattern.gather(-1, inside[:, None, None, None].expand(*pattern.shape[:3], 1))[..., 0]
        counted = block.real & (torch.arange(block.rows.start, block.rows.stop, device=first.device) > first[:, None])
        return as_float64(on_first * counted[:, None]).sum(dim=(0, 2)).cpu()

    def _keep_patterns(self, pattern: Tensor, block: RowBlock, places: slice) -> None:
        for text, kept in self.patterns.items():
            real = self.batch.mask[text].nonzero()[:, 0]
            rows = (real >= block.rows.start) & (real < block.rows.stop)
            keys = real[real < pattern.shape[-1]]
            chosen = pattern[text][:, real[rows] - block.rows.start][:, :, keys].to(torch.float16).cpu()
            kept[places][:, rows.cpu(), : len(keys)] = chosen

    def _measure(self, heads: list[int], block: RowBlock) -> None:
        layer, mask = block.layer, block.mask
        queries, first = zip(*self._layers.pop(layer), strict=True)
        q = torch.cat(queries, dim=2).cpu()
        group = block.q.shape[1] // block.k.shape[1]
        k = local_half(block.k[:, [head // group for head in heads], : mask.queries], mask).cpu()
        own = id(self)  # a rule may outlive this observer
        pairs: Pairs = mask.once(("pairs", own), lambda: visible_pairs(self.tokens, mask, self.plan.seed))
        self.all_pairs[layer] = pairs
        self.pairs[layer] = mask.once(("sample", own), lambda: visible_pairs(self.sample, mask, self.plan.seed))
        rows = torch.linspace(0, mask.queries - 1, min(ROWS, mask.queries)).long()
        seen = mask.once(("rows", own), lambda: self._seen(mask, rows))
        after_first = int(self.batch.mask.sum()) - len(self.batch.ids)
        shares = (torch.stack(first).sum(dim=0).double() / (after_first or math.nan)).tolist()
        one = partial(OneHead, self.plan, self.batch, self.tokens, self.places, block, pairs, rows, seen)
        # Sorting, most of the work, releases the interpreter lock.
        self.embedded += in_threads(
            lambda place: one(heads[place], q[:, place], k[:, place]).embedded(shares[place]), len(heads)
        )

    def _seen(self, mask: MaskRule, rows: Int[Tensor, " row"]) -> Bool[Tensor, "batch row key"]:
        """Returns the keys that the given rows see; padding rows see none."""
        if len(rows) == mask.queries:
            visible = mask.visible(range(mask.queries))[:, 0]
        else:
            visible = torch.cat([mask.visible(range(row, row + 1))[:, 0] for row in rows.tolist()], dim=1)
        real = self.batch.mask
        return (visible[..., : mask.queries] & real[:, rows, None] & real[:, None]).cpu()
