"""Chooses whole texts from a corpus at random, as one batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from numpy.random import Philox
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ...model.inputs.encoder import Inputs
from ...model.inputs.images import ImageEncoder
from ...model.run.hooked import HookedModel
from ...runs.corpus import CorpusBatch, batches

TOKENS: Final = 2**14
"""The smallest number of tokens that are run, if the corpus has that many."""


@dataclass(frozen=True)
class ChosenTexts:
    """Texts as one batch, with their numbers in the corpus."""

    batch: Batch
    documents: tuple[int, ...]
    seen: int
    """The number of texts in the corpus."""
    truncated: int
    """The number of the corpus's texts that were cut to the model's length."""


def choose_texts(
    model: HookedModel, inputs: Iterable[Inputs], *, tokens: int, seed: int, bos: bool | None, truncate: bool
) -> ChosenTexts:
    """Takes the first texts of a corpus in a random order, up to `tokens` tokens and at least one text.

    The order depends only on the seed and on each text's content. Only the token ids of texts that may still be chosen
    are stored, so memory does not grow with the corpus.
    """
    kept: list[tuple[int, int, Tensor]] = []
    total = seen = truncated = 0
    for part in batches(inputs, model, truncate=truncate, bos=bos):
        seen, truncated = seen + len(part.documents), truncated + part.truncated
        digests = part.batch.digests.tolist()
        for (number, content, length), digest in zip(_contents(part, model), digests, strict=True):
            kept.append((int(Philox(key=[seed, digest % 2**64]).random_raw()), number, content))
            total += length
        kept.sort(key=lambda entry: entry[:2])
        while total > tokens and len(kept) > 1:
            total -= _length(kept.pop()[2], model)
    kept.sort(key=lambda entry: entry[1])
    return ChosenTexts(_joined(model, kept, bos), tuple(number for _, number, _ in kept), seen, truncated)


def _contents(part: CorpusBatch, model: HookedModel) -> "Iterable[tuple[int, Tensor, int]]":
    """Yields each text's number, its ids or pixels, and its length."""
    batch = part.batch
    images = isinstance(model.encoder, ImageEncoder)
    own_target = batch.target is not None and batch.target.ids.shape[1] > 1
    if not images and (batch.extra or own_target):
        raise InputError(
            "an iterator for a joint embedding must yield only texts or token ids; pass inputs with further "
            "tensors, such as token types or a decoder's tokens, as one mapping."
        )
    for row, number in enumerate(part.documents.tolist()):
        content = batch.extra["pixel_values"][row] if images else batch.ids[row][batch.mask[row]]
        yield number, content.cpu(), int(batch.mask[row].sum())


def _length(content: Tensor, model: HookedModel) -> int:
    return len(model.encoder.grid.labels) if isinstance(model.encoder, ImageEncoder) else len(content)


def _joined(model: HookedModel, kept: list[tuple[int, int, Tensor]], bos: bool | None) -> Batch:
    rows: list[Any] = [content for _, _, content in kept]
    if isinstance(model.encoder, ImageEncoder):
        return model.encode(torch.stack(rows))
    return model.encode(rows)
