"""Which texts form a claim, and which check it? No text does both, not even as a copy of itself."""

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
"""About how many tokens a batch has."""


def halves(
    model: HookedModel, inputs: Inputs | Iterable[Inputs], *, bos: bool | None = None, seed: int = 0
) -> tuple[list[Batch], list[Batch]]:
    """Half of the different texts, drawn by `seed`, and the other half; copies of a text are on the same side.

    Raises `InputError` if there are fewer than two different texts.
    """
    parts = batches_of(model, inputs, _TOKENS, bos)
    digests = sorted({digest for part in parts for digest in part.batch.digests.tolist()})
    if len(digests) < 2:
        raise InputError(
            "one half of the texts forms the advice and the other checks it, so at least two different texts are "
            "needed; got one. Give more texts."
        )
    # The bits are Philox's, so every version of numpy draws the same.
    drawn = Philox(key=[seed, len(digests)]).random_raw(len(digests)).tolist()
    order = sorted(range(len(digests)), key=lambda each: drawn[each])
    forming = {digests[each] for each in order[: len(order) // 2]}
    found: tuple[list[Batch], list[Batch]] = [], []
    for part in parts:
        forms = torch.tensor([digest in forming for digest in part.batch.digests.tolist()])
        for side, chosen in zip(found, (forms, ~forms), strict=True):
            rows: Tensor = chosen.nonzero()[:, 0]
            if len(rows):
                side.append(part.batch.texts(rows))
    return found
