"""Rows of several requests as one batch that is aligned on the right, and their attention.

Column K − 1 of a group is the newest key of each request, so its rows, be they parts of prompts or single new tokens,
are range(K − Q, K), and a request of n tokens begins at column K − n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..maths.softmax import Attention, softmax_with_sink

Made = TypeVar("Made")


@dataclass(frozen=True)
class Kernel:
    """What an engine's attention kernel computes with, besides queries, keys and values."""

    scale: float
    window: int | None = None  # the number of keys that a row sees, its own included; None without a window
    softcap: float = 0.0  # scores s become c·tanh(s / c); 0 without a cap
    slopes: Float[Tensor, " head"] | None = None  # ALiBi: slope·(j − i) is added to scores
    sink: Float[Tensor, " head"] | None = None  # logits in the denominator of the softmax (gpt-oss)


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of one request."""

    request: int  # the index of the request in its step
    rows: range  # the positions of the rows in the request


@dataclass(frozen=True, eq=False)
class Group:
    """Pieces of some requests as a batch; what depends only on its mask is made once for all layers."""

    pieces: Sequence[Piece]
    rows: range  # the columns of the rows
    first: Int[Tensor, " request"]  # the column at which each request begins
    real: Bool[Tensor, "request row"]  # False before the rows of a piece that is shorter than others
    _made: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> "Group":
        keys, queries = max(piece.rows.stop for piece in pieces), max(len(piece.rows) for piece in pieces)
        first = torch.tensor([keys - piece.rows.stop for piece in pieces], device=device)
        short = torch.tensor([queries - len(piece.rows) for piece in pieces], device=device)
        return cls(pieces, range(keys - queries, keys), first, torch.arange(queries, device=device) >= short[:, None])

    def positions(self, window: int | None) -> Int[Tensor, "request key"]:
        """The position of each column in its request; that of the newest key where no row sees the column.

        Memory that no row sees may hold anything, also NaN, and is not read.
        """

        def make() -> Tensor:
            column = torch.arange(self.rows.stop, device=self.first.device)
            return torch.where(self.visible(window).any(dim=2)[:, 0], column, self.rows.stop - 1) - self.first[:, None]

        return self.once(("positions", window), make)

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """What `make` returned when it was first called for this key."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def visible(self, window: int | None) -> Bool[Tensor, "request 1 row key"]:
        def make() -> Tensor:
            key = torch.arange(self.rows.stop, device=self.first.device)
            row = key[self.rows.start :, None]
            causal = key <= row if window is None else (key <= row) & (key > row - window)
            return (causal & (key >= self.first[:, None, None]))[:, None]

        return self.once(("visible", window), make)


def groups_of(pieces: Sequence[Piece], heads: int, device: torch.device, most: int = 2**25) -> list[Group]:
    """Packs pieces into groups whose scores take about `most` bytes in float32; long pieces are divided."""
    parts = []
    for piece in pieces:
        at_once = max(1, most // (4 * heads * piece.rows.stop))
        starts = range(piece.rows.start, piece.rows.stop, at_once)
        parts += [Piece(piece.request, range(row, min(row + at_once, piece.rows.stop))) for row in starts]
    parts.sort(key=lambda part: (len(part.rows), part.rows.stop))
    groups: list[list[Piece]] = []
    for part in parts:
        # Parts are sorted, so the latest has the most rows, and (nearly always) the most keys.
        size = 4 * heads * len(part.rows) * part.rows.stop
        single = len(part.rows) == 1
        if not groups or (len(groups[-1]) + 1) * size > most or (len(groups[-1][0].rows) == 1) != single:
            groups.append([])
        groups[-1].append(part)
    return [Group.of(group, device) for group in groups]


def attention_of(
    group: Group, q: Float[Tensor, "request row head d"], k: Float[Tensor, "kv_head request key d"], kernel: Kernel
) -> Attention:
    """The attention of a group's rows, in float32 at least."""
    precise = torch.promote_types(q.dtype, torch.float32)
    queries = rearrange(q.to(precise), "request row (kv shared) d -> kv request (shared row) d", kv=len(k))
    scores = queries @ k.to(precise).mT * kernel.scale
    scores = rearrange(scores, "kv request (shared row) key -> request (kv shared) row key", row=q.shape[1])
    if kernel.softcap:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if kernel.slopes is not None:
        key = torch.arange(group.rows.stop, device=q.device)
        scores = scores + kernel.slopes.to(scores)[:, None, None] * (key - key[group.rows.start :, None])
    scores = scores.masked_fill(~group.visible(kernel.window), torch.finfo(precise).min)
    pattern, at_sink = softmax_with_sink(scores, kernel.sink)
    return Attention(scores, pattern, at_sink=at_sink)


def error_of(
    group: Group,
    attention: Attention,
    v: Float[Tensor, "kv_head request key d_value"],
    output: Float[Tensor, "request row head d_value"],
) -> Float[Tensor, ""]:
    """The largest difference of Σ_j p_ij v_j from the kernel's own output, relative to its largest entry."""
    pattern = attention.pattern
    rows = rearrange(pattern, "request (kv shared) row key -> kv request (shared row) key", kv=len(v))
    z = rearrange(rows @ v.to(pattern), "kv request (shared row) d -> request row (kv shared) d", row=pattern.shape[2])
    exact, padding = output.to(pattern), ~group.real[..., None, None]
    off, largest = (value.masked_fill(padding, 0.0).abs().amax() for value in (z - exact, exact))
    error: Tensor = off / largest.clamp_min(torch.finfo(pattern.dtype).tiny)
    return error
