"""Masks texts for the loss of a masked language model: every ordinary token is masked once, with others of its
group.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from numpy.random import Philox
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ..structure.text_part import text_setting

GROUPS: Final = 7
"""The ordinary tokens of a text form this many groups of nearly equal size, each with about 15 % of the tokens."""


@dataclass(frozen=True)
class MaskedCopies:
    """Copies of the texts of a batch, each with one group of tokens masked; the copies of a text are consecutive."""

    batch: Batch
    """The copies, with the original `tokens`; the mask token counts as ordinary, like the token that it hides."""
    hidden: Int[Tensor, "copy position"]
    """The original id at each masked token; -1 at all other tokens."""
    text_of: Int[Tensor, " copy"]
    """The index of each copy's text in the batch."""

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
