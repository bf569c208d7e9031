"""Repeated sequences of random tokens, which show what a head does independently of any text."""

from collections.abc import Iterator
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
from ...model.run.hooked import HookedModel
from ...runs.haystacks import COUNT, first_token, ordinary_tokens

_SHORTEST, _LONGEST = 14, 60
"""The shortest and the longest repeated part. Lengths differ, so that copies are not at a fixed distance."""


TOKENS: Final = COUNT * (_SHORTEST + _LONGEST + 1)
"""The total number of tokens."""


def repeated_sequences(model: HookedModel, *, seed: int = 0) -> Iterator[Int[Tensor, "1 position"]]:
    """Yields repeated sequences of distinct random tokens, each after the token with which the model's texts begin.

    Raises `InputError` for a model that reads no tokens, or too few.
    """
    ordinary, begin = ordinary_tokens(model), first_token(model)
    limit = model.longest_text or 2 * _LONGEST + 1
    longest = min(_LONGEST, (limit - len(begin)) // 2, len(ordinary))
    if longest < 4:
        raise InputError(
            f"this model reads {limit} tokens and has {len(ordinary)} ordinary tokens, too few for two copies of a "
            "sequence; give `inputs`."
        )
    shortest = min(_SHORTEST, max(2, longest // 2))
    generator = torch.Generator().manual_seed(seed)
    for number in range(COUNT):
        length = shortest + (longest - shortest) * number // (COUNT - 1)
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:length]]
        yield torch.cat((begin, chosen, chosen))[None]
