"""Finds the highest and the lowest logit that a head writes for a token, and the place of the token's own logit.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from einops import einsum
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ...maths.blocks import block_bytes
from ...maths.statistic import Statistic, Statistics

TOP: Final = 10  # copied: the own logit is among this many highest; suppressed: among this many lowest
_TOKENS: Final = 1024  # the largest number of tokens read whose logits are computed at a time


@dataclass(frozen=True)
class OwnPlaces:
    """The place of each token read in the order of the logits that a head writes for it."""

    above: Int[Tensor, "*heads token"]  # the number of tokens of the vocabulary with a higher logit
    below: Int[Tensor, "*heads token"]  # the number of tokens of the vocabulary with a lower logit
    vocab: int

    @property
    def from_top(self) -> Float[Tensor, "*heads token"]:
        """The number of tokens with a higher logit, and half of those with the same."""
        return (self.vocab - 1 + self.above - self.below).double() / 2

    @property
    def from_bottom(self) -> Float[Tensor, "*heads token"]:
        """The number of tokens with a lower logit, and half of those with the same."""
        return self.vocab - 1 - self.from_top


@dataclass(frozen=True, kw_only=True)
class OwnStatistic(Statistic):
    """A mean over the tokens that a head reads, with its value for each."""

    value: Callable[[OwnPlaces], Tensor]
    chance: Callable[[int], float]  # the mean for logits unrelated to the token read, by size of the vocabulary


def _chance_of_top(vocab: int) -> float:
    return min(1.0, TOP / vocab)


class OwnTokens:
    """How heads write the tokens that they read; ties count half."""

    own_rank = OwnStatistic(
        meaning="The mean share of the other tokens whose logit is below the own token's: 1 where the head raises the "
        "own token most, 0 where it lowers it most, 0.5 by chance.",
        label="mean rank of the own token",
        value=lambda own: own.from_bottom / max(1, own.vocab - 1),
        chance=lambda vocab: 0.5,
    )
    copied = OwnStatistic(
        meaning=f"The share of the tokens read whose own logit is among the {TOP} that the head raises most.",
        label=f"own token among the {TOP} raised most",
        value=lambda own: own.from_top < TOP,
        chance=_chance_of_top,
    )
    suppressed = OwnStatistic(
        meaning=f"The share of the tokens read whose own logit is among the {TOP} that the head lowers most (McDougall "
        "et al. 2023).",
        label=f"own token among the {TOP} lowered most",
        value=lambda own: own.from_bottom < TOP,
        chance=_chance_of_top,
    )


OWN: Final = Statistics(OwnTokens, OwnStatistic)  # how heads write the tokens that they read; ties count half


class TokenStatistics(OwnTokens):
    """The numbers of each head."""

    successor = Statistic(
        meaning="The share of the tokens of ordered classes (digits, letters, number words, weekdays, months) whose "
        "successor is the token of the class that the head raises most (Gould et al. 2023); NaN if the vocabulary "
        "holds too few of them as single tokens.",
        label="successor raised most",
    )


STATISTICS: Final = Statistics(TokenStatistics, Statistic)  # the numbers of each head


def extremes_of(
    values: Float[Tensor, "kv token d_value"],
    W_O: Float[Tensor, "head d_value d_model"],
    read: Int[Tensor, " token"],
    directions: Callable[[Tensor], Tensor],
    vocab: int,
) -> dict[str, Shaped[Tensor, "head token"]]:
    """The extremes of v W_O·d_a over all tokens a of the vocabulary, block by block.

    For each head and each token read: the "highest" and the "lowest" logit, the tokens "raised" and "lowered" to them
    (of equal ones, that with the lowest id), and the numbers of tokens "above" and "below" the own token.

    >>> eye = torch.eye(3)
    >>> extremes = extremes_of(-eye[None, 1:], eye[None], torch.tensor([1, 2]), lambda ids: eye[ids], 3)
    >>> [extremes[name].tolist() for name in ("lowered", "raised", "below")]
    [[[1, 2]], [[0, 0]], [[0, 0]]]

    Args:
        values: v of each token read.
        W_O: the output weights of the heads, which share values in groups.
        read: the ids of the tokens read.
        directions: a function of ids that returns d `[id d_model]`.
        vocab: the size of the vocabulary.
    """
    heads, tokens, group = len(W_O), len(read), len(W_O) // len(values)
    read_back = einsum(W_O, directions(read), "head d_value d_model, token d_model -> head token d_value")
    own = (values.repeat_interleave(group, dim=0) * read_back).sum(dim=-1)
    lowest = torch.full_like(own, torch.inf)
    zeros = torch.zeros(4, heads, tokens, dtype=torch.long, device=own.device)
    extremes = {"highest": -lowest, "lowest": lowest}
    extremes |= dict(zip(("raised", "lowered", "above", "below"), zeros, strict=True))
    rows = min(tokens, _TOKENS)
    width = max(1, block_bytes(own.device) // (rows * own.element_size()))
    space = own.new_empty(2, rows * width)
    for start in range(0, vocab, width):
        ids = torch.arange(start, min(start + width, vocab), device=read.device)
        written = einsum(W_O, directions(ids), "head d_value d_model, id d_model -> head d_value id")
        for first in range(0, tokens, rows):
            some = slice(first, min(first + rows, tokens))
            size = some.stop - first, len(ids)
            logits, marks = (part[: size[0] * size[1]].view(size) for part in space)
            mine = ((read[some] >= start) & (read[some] < start + size[1])).nonzero()[:, 0]
            for head in range(heads):
                torch.matmul(values[head // group, some], written[head], out=logits)
                of_head = own[head, some]
                # The same number as in the comparisons below, so that a token is not above itself by rounding.
                logits[mine, read[some][mine] - start] = of_head[mine]
                extremes["above"][head, some] += torch.gt(logits, of_head[:, None], out=marks).sum(dim=1).long()
                extremes["below"][head, some] += torch.lt(logits, of_head[:, None], out=marks).sum(dim=1).long()
                highest, lowest = logits.amax(dim=1), logits.amin(dim=1)
                # Few rows improve after the first blocks, and only these need a place.
                better = (highest > extremes["highest"][head, some]).nonzero()[:, 0]
                extremes["highest"][head, first + better] = highest[better]
                extremes["raised"][head, first + better] = start + logits[better].argmax(dim=1)
                better = (lowest < extremes["lowest"][head, some]).nonzero()[:, 0]
                extremes["lowest"][head, first + better] = lowest[better]
                extremes["lowered"][head, first + better] = start + logits[better].argmin(dim=1)
    return extremes
