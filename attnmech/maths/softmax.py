"""The softmax of a block of rows, the two highest keys of each row, and its entropy."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

_COLUMNS: Final = 64  # the keys of a row are divided among so many: a multiple of any processor's vector length


def softmax_of(
    scores: Float[Tensor, "batch head row key"], sink: Float[Tensor, " head"] | None = None
) -> Float[Tensor, "batch head row key"]:
    """Computes softmax_j(score_ij) in float32 or, for float64 scores, in float64.

    A sink (gpt-oss) is an extra logit in the denominator, so that a row sums to 1 − its mass.
    """
    return softmax_with_sink(scores, sink)[0]


def softmax_with_sink(
    scores: Float[Tensor, "batch head row key"], sink: Float[Tensor, " head"] | None
) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row"] | None]:
    """Computes `softmax_of`, and the mass of the sink (None without a sink)."""
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sink is None:
        return torch.softmax(precise, dim=-1), None
    column = sink.to(precise)[None, :, None, None].expand(*precise.shape[:-1], 1)
    whole = torch.softmax(torch.cat((precise, column), dim=-1), dim=-1)
    return whole[..., :-1], whole[..., -1]


def left_for_sink(pattern: Float[Tensor, "batch head row key"]) -> Float[Tensor, "batch head row"]:
    """What a sink takes of rows that were set by hand; `softmax_with_sink` gives that of a softmax, exactly."""
    return (1 - pattern.sum(dim=-1)).clamp_min(0)


@dataclass(frozen=True)
class Attention:
    """The attention of a block of rows. Statistics that several observers need are computed once."""

    scores: Float[Tensor, "batch head row key"]
    pattern: Float[Tensor, "batch head row key"]  # the probabilities, in float32 at least
    edited: bool = False  # whether an edit set the probabilities, which are then not the softmax of the scores
    at_sink: Float[Tensor, "batch head row"] | None = None  # the share of a row that a sink takes; None without a sink

    @cached_property
    def top(self) -> "Top":
        return top_two(self.pattern)

    @cached_property
    def entropy(self) -> Float[Tensor, "batch head row"]:
        """−Σ_j p_ij ln p_ij in nats; with a sink, over the keys only.

        ln p_ij = s_ij − s_im + ln p_im, with m the row's highest key. Without this shift by s_im the sums of a long
        row would cancel.
        """
        if self.edited:
            return -torch.xlogy(self.pattern, self.pattern).sum(dim=-1)
        highest = self.scores.gather(-1, self.top.key[..., None])
        # exp(-1000) is 0 in any precision, and 0 · (-inf), where the difference overflows, would be NaN.
        below = torch.einsum("bhrk,bhrk->bhr", self.pattern, (self.scores - highest).clamp_min_(-1000.0))
        return (-below - torch.xlogy(self.pattern.sum(dim=-1), self.top.first)).clamp_min(0.0)


@dataclass(frozen=True)
class Top:
    """The two highest values of each row; they are equal if the highest is tied."""

    key: Int[Tensor, "*places"]  # the index of the highest value; any index if several are equal
    first: Float[Tensor, "*places"]
    second: Float[Tensor, "*places"]  # 0 in a row of one key


def top_two(values: Float[Tensor, "*places key"]) -> Top:
    """Finds the highest and the second highest value of each row, in one pass over it.

    The keys are divided among columns; the largest of each column is found, then the best two of these, then the best
    two of the winning column. A `topk` over all keys takes ten times as long.
    """
    deals = values.shape[-1] // _COLUMNS
    if deals < 4:
        return _two_of_few(values)
    dealt = values[..., : deals * _COLUMNS].view(*values.shape[:-1], deals, _COLUMNS)
    best = _two_of_few(torch.cat((dealt.amax(dim=-2), values[..., deals * _COLUMNS :]), dim=-1))
    in_rest = best.key >= _COLUMNS
    column = best.key.clamp_max(_COLUMNS - 1)[..., None]
    within = _two_of_few(values.gather(-1, column + _COLUMNS * torch.arange(deals, device=values.device)))
    key = torch.where(in_rest, best.key + (deals - 1) * _COLUMNS, within.key * _COLUMNS + column[..., 0])
    return Top(key, best.first, torch.where(in_rest, best.second, torch.maximum(best.second, within.second)))


def _two_of_few(values: Float[Tensor, "*places key"]) -> Top:
    highest = values.max(dim=-1, keepdim=True)
    if values.shape[-1] == 1:
        return Top(highest.indices[..., 0], highest.values[..., 0], torch.zeros_like(highest.values[..., 0]))
    others = values.scatter(-1, highest.indices, -torch.inf)
    return Top(highest.indices[..., 0], highest.values[..., 0], others.amax(dim=-1))
