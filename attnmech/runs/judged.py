"""Prepares the inputs on which a metric is computed: the texts, or masked copies of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..model.run.loss import MaskedCopies
from .corpus import CorpusBatch
from .metrics import Metric


@dataclass(frozen=True)
class JudgedTexts:
    """Batches on which a metric is computed: of the texts or, for the loss of a masked language model, of masked
    copies.

    Copies are numbered like documents, so they run like any other texts.
    """

    parts: Sequence[CorpusBatch]
    judge: Metric
    text_of: Int[Tensor, " input"]  # for each input, the number of its text
    masked: Int[Tensor, " input"] | None = None  # the number of tokens masked in each copy; None if inputs are texts

    @classmethod
    def of(cls, parts: Sequence[CorpusBatch], judge: Metric, tokens: int) -> "JudgedTexts":
        """Makes the copies that a metric needs, in batches of up to `tokens` tokens; a longer copy is a batch by
        itself.

        Raises `InputError` for a text without a token to mask.
        """
        if judge.mask_id is None:
            return cls(parts, judge, torch.arange(sum(len(part.documents) for part in parts)))
        batches: list[CorpusBatch] = []
        of_text: list[Tensor] = []
        hidden: list[Tensor] = []
        for part in parts:
            copies = MaskedCopies.of(part.batch, judge.mask_id)
            copies.require_all(part.documents.tolist())
            first = len(hidden)
            numbers = torch.arange(first, first + len(copies.text_of))
            batches += CorpusBatch(copies.batch, numbers, 0, part.digest).pieces(tokens)
            of_text.append(part.documents[copies.text_of])
            hidden += copies.hidden.unbind()
        targets = torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True, padding_value=-1)
        return cls(batches, replace(judge, hidden=targets), torch.cat(of_text), (targets >= 0).sum(dim=1).cpu())

    def by_text(self, values: Float[Tensor, "..."], axis: int = -1) -> Float[Tensor, "..."]:
        """The mean over the masked tokens of each text, from the values of its copies along an axis."""
        if self.masked is None:
            return values
        moved = values.movedim(axis, -1) * self.masked
        masked = torch.bincount(self.text_of, self.masked)
        sums = moved.new_zeros(*moved.shape[:-1], len(masked)).index_add(-1, self.text_of, moved)
        return (sums / masked).movedim(-1, axis)
