"""Which token should follow each text? From the token's text or its id."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from ..arguments import dense, listed
from ..errors import InputError, index_of
from ..model.hooked import HookedModel

Answers: TypeAlias = str | int | Sequence[str] | Sequence[int] | Tensor | None
"""One token per text: its string, with its leading space, or its id."""


def answer_ids(model: HookedModel, name: str, given: Any, texts: int) -> Int[Tensor, " text"]:
    """One token id per text; `InputError` if one is not a single token."""
    if isinstance(given, Tensor):
        given = dense(f"`{name}`", given).tolist()
    found = [given] if isinstance(given, (str, int)) else listed(name, given, "one token per text, such as [' Tom']")
    if len(found) != texts:
        raise InputError(f"`{name}` must hold one token for each of the {texts} texts; got {len(found)}.")
    ids = []
    for token in found:
        each = token
        if isinstance(each, str):
            if model.tokenizer is None:
                raise InputError(f"`{name}` must be token ids: this model was loaded without a tokenizer.")
            made = model.tokenizer(each, add_special_tokens=False)["input_ids"]
            if len(made) != 1:
                raise InputError(
                    f"`{name}` must be single tokens; {each!r} becomes {len(made)}: "
                    f"{model.tokenizer.convert_ids_to_tokens(made)}. Check the leading space."
                )
            each = made[0]
        ids.append(index_of(name, each, model.n_vocab, "the model's vocabulary"))
    return torch.tensor(ids, device=model.device)
