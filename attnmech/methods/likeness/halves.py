"""Splits texts into a half that forms a claim and a half that checks it; copies of a text stay in the same half."""

from collections.abc import Iterable
from typing import Final

import torch
from numpy.random import Philox
from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel
from ...runs.sweep import batches_of

_TOKENS: Final = 4096
"""The approximate number of tokens in a batch."""


def halves(
    model: HookedModel, inputs: Inputs | Iterable[Inputs], *, bos: bool | None = None, seed: int = 0
) -> tuple[list[Batch], list[Batch]]:
    """Returns one half of the distinct texts, drawn with `seed`, and the other half; copies of a text share a half.

    Raises `InputError` if there are fewer than two different texts.
    """
    parts = batches_of(model, inputs, _TOKENS, bos)
    digests = sorted({digest for part in parts for digest in part.batch.digests.tolist()})
    if len(digests) < 2:
        raise InputError(
            "at least two different texts are needed, since one half forms the advice and the other half checks it; "
            "got one."
        )
    # Philox gives the same bits in every version of numpy.
    drawn = Philox(key=[seed, len(digests)]).random_raw(len(digests)).tolist()
    order = sorted(range(len(digests)), key=lambda number: drawn[number])
    forming = {digests[number] for number in order[: len(order) // 2]}
    sides: tuple[list[Batch], list[Batch]] = [], []
    for part in parts:
        forms = torch.tensor([digest in forming for digest in part.batch.digests.tolist()])
        for side, chosen in zip(sides, (forms, ~forms), strict=True):
            rows: Tensor = chosen.nonzero()[:, 0]
            if len(rows):
                side.append(part.batch.texts(rows))
    return sides
