"""Says what a model's logits predict; computes the mean cross-entropy of a text's next tokens, or of masked tokens."""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.metrics import cross_entropy
from .masking import MaskedCopies

Prediction: TypeAlias = Literal["next token", "masked token", "output", "other"]
"""What a model predicts at each token; "output" stands for classes, or whatever a user's own module returns."""


def predicted_by(model: PreTrainedModel, *, causal: bool, writes_tokens: bool) -> Prediction:
    """What a model with logits predicts, judged by its class in transformers and its attention."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if not writes_tokens or any(part in name for name in names for part in ("Classification", "SentencePrediction")):
        return "output"
    if causal:
        return "next token"
    # The heads of XLM and FlauBERT have an older name than those of other families.
    masked = any(name.endswith(("ForMaskedLM", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")) for name in names)
    return "masked token" if masked else "other"


LogitsOf: TypeAlias = Callable[[Batch], Float[Tensor, "batch position vocab"]]
"""Computes the logits of a batch."""

_TOKENS: Final = 512
"""The logits of about this many tokens are in memory at once."""


def text_losses(batch: Batch, mask_id: int | None, logits_of: LogitsOf) -> Float[Tensor, " text"]:
    """The loss of each text: the loss of its masked tokens if there is a `mask_id`, else of its next tokens."""
    if mask_id is None:
        return next_token_losses(batch, logits_of)
    return masked_token_losses(batch, mask_id, logits_of)


def next_token_losses(batch: Batch, logits_of: LogitsOf) -> Float[Tensor, " text"]:
    """−ln p(next token), in nats, mean over the tokens of each text that have a next one, in float64.

    Raises `InputError` for a text of a single token.
    """
    whole = batch if batch.target is None else batch.target
    if int(whole.lengths.min()) < 2:
        short = int(whole.lengths.argmin())
        raise InputError(f"a loss needs a text of two tokens or more; text {short} has one.")
    # There is no padding between the tokens of a text.
    predicted = whole.has_next
    sums = _sums(batch, predicted, whole.ids.roll(-1, dims=1), logits_of)
    return sums / predicted.sum(dim=1).cpu()


def masked_token_losses(batch: Batch, mask_id: int, logits_of: LogitsOf) -> Float[Tensor, " text"]:
    """−ln p(token), in nats, mean over the ordinary tokens of each text, each masked once (`MaskedCopies`), in float64.

    Raises `InputError` for a text without such tokens.
    """
    copies = MaskedCopies.of(batch, mask_id)
    copies.require_all(range(len(batch.ids)))
    hidden = copies.hidden >= 0
    by_copy = torch.stack((_sums(copies.batch, hidden, copies.hidden, logits_of), as_float64(hidden.sum(dim=1)).cpu()))
    sums, counts = by_copy.new_zeros(2, len(batch.ids)).index_add(1, copies.text_of, by_copy).unbind()
    return sums / counts


def _sums(
    batch: Batch, rows: Bool[Tensor, "batch position"], targets: Int[Tensor, "batch position"], logits_of: LogitsOf
) -> Float[Tensor, " batch"]:
    """The sum of −ln p(target) over some rows of each text."""
    sums = []
    for chosen in torch.split(torch.arange(len(batch.ids)), max(1, _TOKENS // batch.ids.shape[1])):
        here = chosen.to(rows.device)
        logits, (text, position) = logits_of(batch.texts(chosen)), rows[here].nonzero().unbind(dim=1)
        losses = as_float64(cross_entropy(logits[text, position], targets[here][text, position]))
        zeros = losses.new_zeros(len(chosen))
        sums.append(zeros.index_add(0, text.to(losses.device), losses).cpu())
    return torch.cat(sums)
