"""Which sequences show what a head does whatever the text is? Random tokens, each sequence twice."""

from collections.abc import Iterator
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
from ...model.run.hooked import HookedModel

COUNT: Final = 24
"""How many sequences are generated."""

_SHORTEST, _LONGEST = 14, 60
"""The lengths of what is repeated; they differ, so that a copy stands at no fixed distance."""


TOKENS: Final = COUNT * (_SHORTEST + _LONGEST + 1)
"""How many tokens these are, together."""


def repeated_sequences(model: HookedModel, *, seed: int = 0) -> Iterator[Int[Tensor, "1 position"]]:
    """Sequences of distinct random tokens, each twice, after the token with which the model's texts begin.

    Raises `InputError` for a model that takes no tokens, or too few of them.
    """
    if not model.reads_tokens:
        given = {"tensors": "what the module is called with", "pixels": "images"}.get(model.architecture.reads, "sound")
        raise InputError(f"repeated tokens are for models of text; give {given} as `inputs`.")
    begin = _first_token(model)
    limit = model.architecture.position_limit or 2 * _LONGEST + 1
    # Some models count positions from the padding on (RoBERTa).
    left_out = {*model.encoder.special, getattr(model.config, "pad_token_id", None)}
    ordinary = torch.tensor([token for token in range(model.n_vocab) if token not in left_out])
    longest = min(_LONGEST, (limit - len(begin)) // 2, len(ordinary))
    if longest < 4:
        raise InputError(
            f"this model takes {limit} tokens of {len(ordinary)} kinds, too few for two copies of a sequence; give "
            "`inputs`."
        )
    shortest = min(_SHORTEST, max(2, longest // 2))
    generator = torch.Generator().manual_seed(seed)
    for number in range(COUNT):
        length = shortest + (longest - shortest) * number // (COUNT - 1)
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:length]]
        yield torch.cat((begin, chosen, chosen))[None]


def _first_token(model: HookedModel) -> Int[Tensor, " position"]:
    """The token that the tokenizer puts in front of a text, if it does."""
    if model.tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    batch = model.encode("a")
    return batch.ids[0, :1].cpu() if batch.bos else torch.zeros(0, dtype=torch.long)
