"""Repeated sequences of random tokens, which show what a head does independently of any text."""

from collections.abc import Iterator
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
from ...model.run.hooked import HookedModel

COUNT: Final = 24
"""The number of sequences."""

_SHORTEST, _LONGEST = 14, 60
"""The shortest and the longest repeated part. Lengths differ, so that copies are not at a fixed distance."""


TOKENS: Final = COUNT * (_SHORTEST + _LONGEST + 1)
"""The total number of tokens."""


def repeated_sequences(model: HookedModel, *, seed: int = 0) -> Iterator[Int[Tensor, "1 position"]]:
    """Yields repeated sequences of distinct random tokens, each after the token with which the model's texts begin.

    Raises `InputError` for a model that reads no tokens, or too few.
    """
    ordinary, begin = ordinary_tokens(model), first_token(model)
    limit = model.architecture.position_limit or 2 * _LONGEST + 1
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


def ordinary_tokens(model: HookedModel) -> Int[Tensor, " token"]:
    """The tokens that are not special; raises `InputError` for a model that reads no tokens."""
    if not model.reads_tokens:
        kind = {"tensors": "the arguments of the module", "pixels": "images"}.get(model.architecture.reads, "sound")
        raise InputError(f"repeated tokens are for models of text; give {kind} as `inputs`.")
    # Some models number positions from the padding token's id (RoBERTa).
    left_out = {*model.encoder.special, getattr(model.config, "pad_token_id", None)}
    return torch.tensor([token for token in range(model.n_vocab) if token not in left_out])


def first_token(model: HookedModel) -> Int[Tensor, " position"]:
    """The token that the tokenizer puts before a text, if any."""
    if model.tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    batch = model.encode("a")
    return batch.ids[0, :1].cpu() if batch.bos else torch.zeros(0, dtype=torch.long)
