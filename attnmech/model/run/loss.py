"""Says what a model's logits predict; computes the mean cross-entropy of a text's next tokens, or of masked tokens.

For the loss of a masked language model, every ordinary token of a text is masked once, with others of its group.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Philox
from torch import Tensor
from transformers import PreTrainedModel

from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.metrics import cross_entropy
from ..structure.text_part import text_setting

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


LogitsOf: TypeAlias = Callable[[Batch], Float[Tensor, "batch position vocab"]]  # computes the logits of a batch

_TOKENS: Final = 512  # the logits of about this many tokens are in memory at once

GROUPS: Final = 7  # the ordinary tokens of a text form this many groups of nearly equal size, each about 15 % of them


def text_losses(batch: Batch, mask_id: int | None, logits_of: LogitsOf) -> Float[Tensor, " text"]:
    """The loss of each text: the loss of its masked tokens if there is a `mask_id`, else of its next tokens."""
    return next_token_losses(batch, logits_of) if mask_id is None else masked_token_losses(batch, mask_id, logits_of)


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
    return _sums(batch, predicted, whole.ids.roll(-1, dims=1), logits_of) / predicted.sum(dim=1).cpu()


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
        sums.append(losses.new_zeros(len(chosen)).index_add(0, text.to(losses.device), losses).cpu())
    return torch.cat(sums)


@dataclass(frozen=True)
class MaskedCopies:
    """Copies of the texts of a batch, each with one group of tokens masked; the copies of a text are consecutive."""

    batch: Batch  # the copies, with the original `tokens`; the mask token counts as ordinary, like the token it hides
    hidden: Int[Tensor, "copy position"]  # the original id at each masked token; -1 at all other tokens
    text_of: Int[Tensor, " copy"]  # the index of each copy's text in the batch

    @classmethod
    def of(cls, batch: Batch, mask_id: int) -> "MaskedCopies":
        """Masks each ordinary token of each text in one of the copies of that text.

        Special tokens and padding are never masked. A text of fewer than `GROUPS` ordinary tokens has one copy for each
        of them; a text without ordinary tokens has no copy. Which tokens share a copy depends only on the ids of the
        text.
        """
        ordinary = batch.mask & ~batch.is_special & (batch.ids != mask_id)
        group = torch.stack([_groups(*row) for row in zip(batch.ids, batch.mask, ordinary, strict=True)])
        counts = group.amax(dim=1) + 1
        text_of = torch.arange(len(counts)).repeat_interleave(counts)
        copy = torch.cat([torch.arange(count) for count in counts.tolist()])
        chosen = (group[text_of] == copy[:, None]).to(batch.ids.device)
        copies = batch.texts(text_of)
        return cls(
            replace(copies, ids=copies.ids.masked_fill(chosen, mask_id), special=batch.special - {mask_id}),
            copies.ids.masked_fill(~chosen, -1),
            text_of,
        )

    def require_all(self, documents: Sequence[int]) -> None:
        """Raises `InputError` with the number, among `documents`, of the first text that has no copy."""
        missing = set(range(len(documents))).difference(self.text_of.tolist())
        if missing:
            raise InputError(
                f"a loss needs a token to mask, but text {documents[min(missing)]} has none besides special tokens."
            )


def mask_id_of(tokenizer: Any, config: Any, name: str) -> int:
    """The id of the mask token, from the tokenizer or else from the config; `InputError` if neither has one."""
    mask_id = known_mask_id(tokenizer, config)
    if mask_id is None:
        lacks = "was loaded without a tokenizer" if tokenizer is None else "has a tokenizer without a mask token"
        raise InputError(
            f"the loss of a masked language model needs its mask token, but {name} {lacks}, and its config has no "
            "`mask_token_id`. Load it with its tokenizer, am.load(model, tokenizer=tokenizer), or set "
            'model.config.mask_token_id; or use metric="kl", which needs no mask.'
        )
    return mask_id


def known_mask_id(tokenizer: Any, config: Any) -> int | None:
    """The id of the mask token, from the tokenizer or else from the config."""
    ids = (getattr(tokenizer, "mask_token_id", None), text_setting(config, "mask_token_id"))
    return next((int(mask_id) for mask_id in ids if mask_id is not None), None)


def _groups(
    ids: Int[Tensor, " position"], real: Bool[Tensor, " position"], ordinary: Bool[Tensor, " position"]
) -> Int[Tensor, " position"]:
    """The group of each ordinary token of a text; -1 at all other positions.

    The random bits come from Philox-4×64 (Salmon et al. 2011), keyed by the ids, so neither padding nor the batch
    matters.
    """
    content = hashlib.sha256(ids[real].cpu().numpy().astype("<i8").tobytes()).digest()
    places = ordinary.cpu().nonzero()[:, 0]
    drawn = Philox(key=int.from_bytes(content[:16], "little")).random_raw(len(places))
    order = torch.from_numpy(drawn.argsort(kind="stable"))
    group = torch.full(ids.shape, -1)
    group[places[order]] = torch.arange(len(places)) % GROUPS
    return group
