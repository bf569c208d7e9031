"""Converts answers (the tokens that should follow texts), given as strings or ids, to ids."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from ..basics.arguments import dense, index_of, listed, shown
from ..basics.messages import warn_user
from ..errors import InputError
from ..model.parts.pieces import read_piece, texts_of_pieces
from ..model.run.hooked import HookedModel

Answers: TypeAlias = str | int | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor | None
"""One token per text: its string with the leading space, or its id. A token outside a list is the answer for every
text.

With metric="log_probability", an answer may have several tokens, given as a string or a list of ids.
"""


class AnswerWarning(UserWarning):
    """An answer lacks its leading space; with the space, it would be a different single token."""


def answer_ids(model: HookedModel, name: str, answers: Any, texts: int) -> Int[Tensor, " text"]:
    """One token id per text, or one for all; raises `InputError` if an answer is not a single token.

    Warns with `AnswerWarning` if a word lacks its leading space, and would be a different single token with it.
    """
    wanted = "one token per text, such as [' Tom'], or one for all, ' Tom'"
    if isinstance(answers, Tensor):
        answers = dense(f"`{name}`", answers).tolist()
    for_all = isinstance(answers, (str, int))
    answers = [answers] if for_all else listed(name, answers, wanted)
    if len(answers) != texts and not for_all:
        raise InputError(
            f"`{name}` must be {wanted}; got {len(answers)} for {texts} {'text' if texts == 1 else 'texts'}."
        )
    if any(isinstance(answer, list | tuple) for answer in answers):
        raise InputError(f"`{name}` must be {wanted}; got {shown(answers)}. The token to compare with is `against`.")
    ids = [_token_id(model, name, answer) if isinstance(answer, str) else answer for answer in answers]
    checked = [index_of(name, token, model.n_vocab, "the model's vocabulary") for token in ids]
    return torch.tensor(checked * (texts if for_all else 1), device=model.device)


def answer_tokens(model: HookedModel, answers: Any, texts: int) -> Int[Tensor, "text longest"]:
    """The ids of each text's answer, one or several, at the end of its row; -1 before them."""
    wanted = "one answer per text, such as [' New York'], or one for all, ' New York'"
    for_all = isinstance(answers, (str, int))
    if isinstance(answers, Tensor):
        answers = dense("`answers`", answers).tolist()
    answers = [answers] * texts if for_all else listed("answers", answers, wanted)
    if len(answers) != texts:
        raise InputError(
            f"`answers` must be {wanted}; got {len(answers)} for {texts} {'text' if texts == 1 else 'texts'}."
        )
    rows = [_all_ids(model, answer) for answer in answers]
    longest = max(map(len, rows))
    return torch.tensor([[-1] * (longest - len(row)) + row for row in rows], device=model.device)


def _all_ids(model: HookedModel, answer: Any) -> list[int]:
    """The ids of one answer, given as a string, an id or a list of ids."""
    if isinstance(answer, str):
        if model.tokenizer is None:
            raise InputError("`answers` must be token ids: this model was loaded without a tokenizer.")
        ids = list(model.tokenizer(answer, add_special_tokens=False)["input_ids"])
    else:
        ids = [answer] if isinstance(answer, int) else listed("answers", answer, "strings, ids or lists of ids")
    if not ids:
        raise InputError(f"an answer must have at least one token; got {answer!r}.")
    return [index_of("answers", token, model.n_vocab, "the model's vocabulary") for token in ids]


def _token_id(model: HookedModel, name: str, text: str) -> int:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"`{name}` must be token ids: this model was loaded without a tokenizer.")
    made = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(made) != 1:
        raise InputError(
            f"`{name}` must be single tokens; {text!r} becomes {len(made)}: "
            f"{list(texts_of_pieces([read_piece(tokenizer, token) for token in made]))}. Check the leading space, or "
            'score the whole answer: metric="log_probability", on texts that end with it.'
        )
    spaced = tokenizer(f" {text}", add_special_tokens=False)["input_ids"] if text[0].isalnum() else made
    if len(spaced) == 1 and spaced[0] not in (made[0], tokenizer.unk_token_id):
        warn_user(
            f"`{name}`: both {text!r} (id {made[0]}) and {' ' + text!r} (id {spaced[0]}) are single tokens; "
            f"{text!r} is used, as given. Within a sentence, the word is {' ' + text!r}: give that instead, or the id "
            f"{made[0]} to keep {text!r} without this warning.",
            AnswerWarning,
        )
    return int(made[0])
