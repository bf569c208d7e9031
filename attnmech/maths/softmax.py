"""What is the softmax of a block of rows, and what follows from it: the two highest keys, the entropy?"""

from dataclasses import dataclass
from functools import cached_property

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from .compiled_rows import MeasuredRows

_DEAL = 32
"""How many keys of a row go into each column in the search for the highest."""


def softmax_of(
    scores: Float[Tensor, "batch head row key"], sink: Float[Tensor, " head"] | None = None
) -> Float[Tensor, "batch head row key"]:
    """softmax_j(score_ij) in float32 or, for float64 scores, in float64.

    A sink (gpt-oss) is an extra logit in the denominator, so that a row sums to 1 − its mass.
    """
    return softmax_with_sink(scores, sink)[0]


def softmax_with_sink(
    scores: Float[Tensor, "batch head row key"], sink: Float[Tensor, " head"] | None
) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row"] | None]:
    """`softmax_of`, and the mass of the sink; None without a sink."""
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sink is None:
        return torch.softmax(precise, dim=-1), None
    column = sink.to(precise)[None, :, None, None].expand(*precise.shape[:-1], 1)
    whole = torch.softmax(torch.cat((precise, column), dim=-1), dim=-1)
    return whole[..., :-1], whole[..., -1]


@dataclass(frozen=True)
class Attention:
    """The attention of a block of rows; what several observers need is computed once."""

    pattern: Float[Tensor, "batch head row key"]
    """The probabilities, in float32 at least."""
    scores: Float[Tensor, "batch head row key"] | None
    """The scores whose softmax they are; None if an edit has set the probabilities."""
    measured: MeasuredRows | None = None
    """What a compiled softmax has measured on its way."""

    @cached_property
    def top(self) -> "Top":
        """The two highest probabilities of each row."""
        found = self.measured
        return top_two(self.pattern) if found is None else Top(found.key, found.first, found.second)

    @cached_property
    def entropy(self) -> Float[Tensor, "batch head row"]:
        """−Σ_j p_ij ln p_ij in nats; with a sink, over the keys only.

        ln p_ij = s_ij − s_im + ln p_im, with m the row's highest key. Without this shift by s_im the sums of a long
        row would cancel.
        """
        if self.measured is not None:
            return self.measured.entropy
        if self.scores is None:
            return -torch.xlogy(self.pattern, self.pattern).sum(dim=-1)
        highest = self.scores.gather(-1, self.top.key[..., None])
        # exp(-1000) is 0 in any precision, and 0 · (-inf), where the difference overflows, would be NaN.
        below = (self.pattern * (self.scores - highest).clamp_min_(-1000.0)).sum(dim=-1)
        return (-below - self.pattern.sum(dim=-1) * self.top.first.log()).clamp_min(0.0)


@dataclass(frozen=True)
class Top:
    """The two highest values of each row; they are equal if the highest is tied."""

    key: Int[Tensor, "*places"]
    """The index of the highest; of equal ones, any."""
    first: Float[Tensor, "*places"]
    second: Float[Tensor, "*places"]
    """0 in a row of one key."""


def top_two(values: Float[Tensor, "*places key"]) -> Top:
    """The highest and the second highest of each row, in one pass over it.

    The keys are dealt to columns, the largest of each column is found, then the best two of these, then the best two
    of the winning column: a `topk` over all keys takes ten times as long.
    """
    keys = values.shape[-1]
    columns = keys // _DEAL
    if columns < 4:
        return _two_of_few(values)
    dealt = rearrange(values[..., : columns * _DEAL], "... (deal column) -> ... deal column", deal=_DEAL)
    rest = values[..., columns * _DEAL :]
    best = _two_of_few(torch.cat((dealt.amax(dim=-2), rest), dim=-1))
    column = best.key.clamp_max(columns - 1)[..., None]
    within = _two_of_few(values.gather(-1, column + columns * torch.arange(_DEAL, device=values.device)))
    in_rest = best.key >= columns
    key = torch.where(in_rest, best.key + (_DEAL - 1) * columns, within.key * columns + column[..., 0])
    return Top(key, best.first, torch.where(in_rest, best.second, torch.maximum(best.second, within.second)))


def _two_of_few(values: Float[Tensor, "*places key"]) -> Top:
    highest = values.max(dim=-1, keepdim=True)
    if values.shape[-1] == 1:
        return Top(highest.indices[..., 0], highest.values[..., 0], torch.zeros_like(highest.values[..., 0]))
    others = values.scatter(-1, highest.indices, -torch.inf)
    return Top(highest.indices[..., 0], highest.values[..., 0], others.amax(dim=-1))
