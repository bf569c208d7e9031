"""Which token should follow each text? From the token's text or its id."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from ..arguments import dense, listed
from ..errors import InputError, index_of
from ..model.hooked import HookedModel
from ..model.pieces import read_piece, texts_of_pieces

Answers: TypeAlias = str | int | Sequence[str] | Sequence[int] | Tensor | None
"""One token per text: its string, with its leading space, or its id. A single one, not in a list, is for all texts."""


class AnswerWarning(UserWarning):
    """An answer was given without its leading space, and with the space it is another single token."""


def answer_ids(model: HookedModel, name: str, given: Any, texts: int) -> Int[Tensor, " text"]:
    """One token id per text, or one for all; `InputError` if one is not a single token.

    Warns with `AnswerWarning` if a word is given without its leading space and is another single token with it.
    """
    if isinstance(given, Tensor):
        given = dense(f"`{name}`", given).tolist()
    for_all = isinstance(given, (str, int))
    found = [given] if for_all else listed(name, given, "one token per text, such as [' Tom'], or one for all, ' Tom'")
    if len(found) != texts and not for_all:
        raise InputError(f"`{name}` must hold one token for each of the {texts} texts; got {len(found)}.")
    ids = [_token_id(model, name, each) if isinstance(each, str) else each for each in found]
    checked = [index_of(name, each, model.n_vocab, "the model's vocabulary") for each in ids]
    return torch.tensor(checked * (texts if for_all else 1), device=model.device)


def _token_id(model: HookedModel, name: str, text: str) -> int:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"`{name}` must be token ids: this model was loaded without a tokenizer.")
    made = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(made) != 1:
        raise InputError(
            f"`{name}` must be single tokens; {text!r} becomes {len(made)}: "
            f"{list(texts_of_pieces([read_piece(tokenizer, each) for each in made]))}. Check the leading space."
        )
    spaced = tokenizer(f" {text}", add_special_tokens=False)["input_ids"] if text[0].isalnum() else made
    if len(spaced) == 1 and spaced[0] not in (made[0], tokenizer.unk_token_id):
        warnings.warn(
            f"`{name}`: both {text!r} (id {made[0]}) and {' ' + text!r} (id {spaced[0]}) are single tokens; "
            f"{text!r} was used, as given. Within a sentence, the word is {' ' + text!r}: give that to choose it, or "
            f"the id {made[0]} to keep {text!r} without this warning.",
            AnswerWarning,
            stacklevel=2,
        )
    return int(made[0])
