"""Which tokens does a word consist of?"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import shown
from ..batch import Batch
from ..errors import InputError
from ..model.hooked import HookedModel


def words_of(model: HookedModel, batch: Batch, words: Sequence[str]) -> Float[Tensor, "word position"]:
    """1 where a token belongs to a word of the batch's only text, which the words make up; 0 for tokens that the
    tokenizer adds.

    A token belongs to the word in which its first character that is no space stands. Raises `InputError` for a word
    without a token, and for a tokenizer that does not say where its tokens stand.
    """
    text = "".join(words)
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError("labels by words need a model with a fast tokenizer; give labels by tokens, with a string.")
    assert model.tokenizer is not None
    for special in (True, False):
        read = model.tokenizer(text, return_offsets_mapping=True, add_special_tokens=special)
        if read["input_ids"] == batch.ids[0].tolist():
            break
    else:
        raise InputError(
            f"the tokenizer reads {shown(text)} otherwise than the model was given it; label tokens instead."
        )
    ends = torch.tensor([len(word) for word in words]).cumsum(dim=0)
    member = torch.zeros(len(words), batch.ids.shape[1])
    for place, (start, end) in enumerate(read["offset_mapping"]):
        inner = start + len(text[start:end]) - len(text[start:end].lstrip())
        if end > start and inner < len(text):
            member[int(torch.searchsorted(ends, min(inner, end - 1), right=True)), place] = 1
    for number, word in enumerate(words):
        if not member[number].any():
            raise InputError(f"word {number}, {word!r}, has no token of its own in {shown(text)}.")
    return member
