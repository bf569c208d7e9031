"""How well does a model predict each text? The mean cross-entropy of its next tokens."""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from ..batch import Batch
from ..errors import InputError
from ..maths.metrics import cross_entropy

_TOKENS: Final = 512
"""Roughly how many tokens of logits are held at once."""


def next_token_losses(
    batch: Batch, logits_of: Callable[[Batch], Float[Tensor, "batch position vocab"]]
) -> Float[Tensor, " text"]:
    """−ln p(next token), in nats, mean over the tokens of each text that have a next one, in float64.

    Raises `InputError` for a text of a single token.
    """
    lengths = (batch if batch.target is None else batch.target).lengths
    if int(lengths.min()) < 2:
        short = int(lengths.argmin())
        raise InputError(f"a loss needs a text of two tokens or more; text {short} has one.")
    found = []
    for chosen in torch.split(torch.arange(len(batch.ids)), max(1, _TOKENS // batch.ids.shape[1])):
        some = batch.texts(chosen)
        logits, whole = logits_of(some), some if some.target is None else some.target
        # Between a text's tokens there is no padding.
        predicted = whole.mask[:, :-1] & whole.mask[:, 1:]
        text, position = predicted.nonzero().unbind(dim=1)
        losses = cross_entropy(logits[text, position], whole.ids[text, position + 1]).double()
        sums = torch.zeros(len(whole.ids), dtype=torch.float64, device=losses.device).index_add(0, text, losses)
        found.append((sums / predicted.sum(dim=1)).cpu())
    return torch.cat(found)
