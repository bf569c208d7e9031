"""Chooses whole texts from a corpus at random, as one batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from numpy.random import Philox
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ...model.inputs.encoder import Encoder, Inputs
from ...model.inputs.encoders import tokenized
from ...model.inputs.images import ImageEncoder
from ...model.parts.pieces import Tokenized
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


def choose_texts(
    model: HookedModel, inputs: Iterable[Inputs], *, tokens: int, seed: int, bos: bool | None, truncate: bool
) -> ChosenTexts:
    """Takes the first texts of a corpus in a random order, up to `tokens` tokens and at least one text.

    The order depends only on the seed and on each text's content. Only the token ids of texts that may still be chosen
    are stored, so memory does not grow with the corpus.
    """
    kept: list[tuple[int, int, int, Tensor | Tokenized]] = []
    """The rank, number, length and content of each text."""
    total = seen = 0
    for part in batches(inputs, model, truncate=truncate, bos=bos):
        seen += len(part.documents)
        numbers = (numbers.tolist() for numbers in (part.batch.digests, part.documents, part.batch.lengths))
        for digest, number, length, content in zip(*numbers, _contents(part, model), strict=True):
            kept.append((int(Philox(key=[seed, digest % 2**64]).random_raw()), number, length, content))
            total += length
        kept.sort(key=lambda entry: entry[:2])
        while total > tokens and len(kept) > 1:
            total -= kept.pop()[2]
    kept.sort(key=lambda entry: entry[1])
    return ChosenTexts(_joined(model, [entry[-1] for entry in kept]), tuple(entry[1] for entry in kept), seen)


def _contents(part: CorpusBatch, model: HookedModel) -> Sequence[Tensor | Tokenized]:
    batch = part.batch
    batch.require_text_alone("embedded")
    images = isinstance(model.encoder, ImageEncoder)
    own_target = batch.target is not None and batch.target.ids.shape[1] > 1
    if not images and (batch.extra or own_target):
        raise InputError(
            "an iterator for a joint embedding must yield only texts or token ids; pass inputs with further "
            "tensors, such as token types or a decoder's tokens, as one mapping."
        )
    return list(batch.extra["pixel_values"].cpu()) if images else tokenized(model.encoder, batch)


def _joined(model: HookedModel, contents: Sequence[Any]) -> Batch:
    encoder = model.encoder
    return encoder.padded(contents) if isinstance(encoder, Encoder) else model.encode(torch.stack(list(contents)))
