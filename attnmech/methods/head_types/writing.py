"""Measures whether a head writes the tokens that it attends to: how highly the head's output from a key ranks the key's
token.
"""

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

_CHUNK = 64
"""The number of keys that are compared with all tokens at a time."""


def rank_above(
    value: Float[Tensor, "*places 1"], others: Float[Tensor, "*places other"], counted: Bool[Tensor, "*#places other"]
) -> Float[Tensor, "*places"]:
    """Returns the share of the counted other values that `value` exceeds; equal values count half.

    >>> rank_above(torch.tensor([2.0]), torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([True, True, True, False]))
    tensor(0.5000)
    """
    sign = (others - value).sign_()  # −1 where the other value is smaller
    balance = einsum(sign, counted.expand_as(sign).to(sign), "... other, ... other -> ...")
    return (0.5 - 0.5 * balance / counted.sum(dim=-1).clamp_min(1)) * counted.any(dim=-1)


def copying(
    values: Float[Tensor, "batch head key d_value"],
    read: Float[Tensor, "batch head token d_value"],
    ids: Int[Tensor, "batch key"],
    counted: Bool[Tensor, "batch key"],
) -> tuple[Float[Tensor, "batch head key"], Bool[Tensor, "batch key"]]:
    """Ranks the token at each key among the text's other tokens, by the logit that the head would write from the key.

    For the token a at key j, (v_j W_O)·u_a is compared with (v_j W_O)·u_b of the text's other tokens b. The rank is 1
    if the head raises the logit of a most, 0 if it raises it least, and 0.5 by chance.

    Args:
        values: v_j.
        read: W_O u_b for the token b at each place.
        ids: the tokens.
        counted: the places that count.

    Returns:
        The ranks (0 at places that do not count), and the places that count, which have another token to compare with.

    Source: in the spirit of Olsson et al. 2022, "In-context Learning and Induction Heads", copying score.

    """
    again = torch.tril(ids[:, :, None] == ids[:, None], diagonal=-1)
    distinct = counted & ~(again & counted[:, None]).any(dim=-1)
    ranks = values.new_zeros(values.shape[:3])
    there = torch.zeros_like(counted)
    for start in range(0, ids.shape[1], _CHUNK):
        keys = slice(start, start + _CHUNK)
        logits = values[:, :, keys] @ read.to(values).transpose(-1, -2)
        own = (values[:, :, keys] * read[:, :, keys].to(values)).sum(dim=-1, keepdim=True)
        others = distinct[:, None] & (ids[:, keys, None] != ids[:, None]) & counted[:, keys, None]
        ranks[:, :, keys] = rank_above(own, logits, others[:, None])
        there[:, keys] = others.any(dim=-1)
    return ranks, there
