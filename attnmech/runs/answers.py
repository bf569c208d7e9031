"""Converts answers (the tokens that should follow texts), given as strings or ids, to ids."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard
from unicodedata import category

import torch
from jaxtyping import Int
from torch import Tensor

from ..basics.arguments import dense, index_of, listed, shown
from ..basics.messages import warn_user
from ..errors import InputError
from ..model.parts.pieces import Tokenized, token_texts
from ..model.reading.unembedding import tokens_with_logits
from ..model.run.hooked import HookedModel
from .in_context import ending, following, require_known

Answers: TypeAlias = str | int | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor | None
"""One token per text: its string with the leading space, or its id. A token outside a list is the answer for every
text.

With metric="log_probability", an answer may have several tokens, given as a string or a list of ids.
"""


class AnswerWarning(UserWarning):
    """An answer lacks its leading space; with the space, it would be a different single token."""


def answer_ids(
    model: HookedModel, name: str, answers: Any, texts: int, prompts: Sequence[Tokenized] | None = None
) -> Int[Tensor, " text"]:
    """One token id per text, each the token of the answer after its prompt; raises `InputError` if that is not one.

    Warns with `AnswerWarning` if a word lacks its leading space, and would be a different single token with it.
    `prompts` holds the tokens of the texts; without them, an answer is a token of the vocabulary.
    """
    wanted = "one token per text, such as [' Tom'], or one for all, ' Tom'"
    answers = _one_a_text(name, answers, texts, wanted)
    if any(isinstance(answer, list | tuple) for answer in answers):
        raise InputError(f"`{name}` must be {wanted}; got {shown(answers)}. The token to compare with is `against`.")
    ids = [
        _token_id(model, name, answer, before) if isinstance(answer, str) else answer
        for answer, before in zip(answers, _each(prompts, texts), strict=True)
    ]
    checked = [index_of(name, token, tokens_with_logits(model), "the tokens that have a logit") for token in ids]
    return torch.tensor(checked, device=model.device)


def answer_tokens(
    model: HookedModel, answers: Any, texts: int, prompts: Sequence[Tokenized] | None = None
) -> Int[Tensor, "text longest"]:
    """The ids of each text's answer, one or several, at the end of its row; -1 before them.

    `prompts` holds the tokens of the texts, which end with the answers.
    """
    wanted = "one answer per text, such as [' New York'], or one for all, ' New York'"
    answers = _one_a_text("answers", answers, texts, wanted)
    rows = [_all_ids(model, *pair) for pair in zip(answers, _each(prompts, texts), strict=True)]
    longest = max(map(len, rows))
    return torch.tensor([[-1] * (longest - len(row)) + row for row in rows], device=model.device)


def _one_a_text(name: str, answers: Any, texts: int, wanted: str) -> list[Any]:
    if isinstance(answers, Tensor):
        answers = dense(f"`{name}`", answers).tolist()
    by_text = [answers] * texts if isinstance(answers, str | int) else listed(name, answers, wanted)
    if len(by_text) != texts:
        raise InputError(
            f"`{name}` must be {wanted}; got {len(by_text)} for {texts} {'text' if texts == 1 else 'texts'}."
        )
    return by_text


def _each(prompts: Sequence[Tokenized] | None, texts: int) -> Sequence[Tokenized | None]:
    return [None] * texts if prompts is None else prompts


def _all_ids(model: HookedModel, answer: Any, text: Tokenized | None) -> list[int]:
    """The ids of one answer, given as a string, an id or a list of ids."""
    if isinstance(answer, str):
        if model.tokenizer is None:
            raise InputError("`answers` must be token ids: this model was loaded without a tokenizer.")
        alone = list(model.tokenizer(answer, add_special_tokens=False)["input_ids"])
        require_known(model, alone, answer)
        end = None if text is None else ending(model, text, answer)
        # A text that does not end with the answer is refused with its tokens (`Metric.rows`).
        ids = alone if end is None else end
    else:
        ids = [answer] if isinstance(answer, int) else listed("answers", answer, "strings, ids or lists of ids")
    if not ids:
        raise InputError(f"an answer must have at least one token; got {answer!r}.")
    return [index_of("answers", token, tokens_with_logits(model), "the tokens that have a logit") for token in ids]


def _token_id(model: HookedModel, name: str, text: str, before: Tokenized | None) -> int:
    """The token of a text after the tokens `before`; without them, the token of the text alone."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"`{name}` must be token ids: this model was loaded without a tokenizer.")
    alone = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    made = following(model, before, text)
    spaced = following(model, before, f" {text}") if text[:1].isalnum() else made
    last = "".join(token_texts(tokenizer, before.ids[-1:].tolist() if before else ()))[-1:] or "a"
    if made is None and last.isspace():
        raise InputError(
            f"`{name}`: the tokenizer joins {text!r} with the space at the end of its text. End the text before the "
            f"space, and give {' ' + text!r}."
        )
    if _is_one(made, tokenizer, text):
        chosen = made[0]
    elif _is_one(alone, tokenizer, text) and (before is None or _is_one(spaced, tokenizer, text)):
        chosen = alone[0]
    else:
        pieces = alone if made is None or len(made) == 1 else made
        raise InputError(
            f"`{name}` must be single tokens; {text!r} becomes {len(pieces)}: {list(token_texts(tokenizer, pieces))}. "
            'Check the leading space, or score the whole answer: metric="log_probability", on texts that end with it.'
        )
    opens = last.isspace() or last in "\"'" or category(last) in ("Ps", "Pi")
    if not opens and _is_one(spaced, tokenizer, text) and spaced[0] != chosen:
        warn_user(
            f"`{name}`: both {text!r} (id {chosen}) and {' ' + text!r} (id {spaced[0]}) are single tokens; "
            f"{text!r} is used, as given. Within a sentence, the word is {' ' + text!r}: give that instead, or the id "
            f"{chosen} to keep {text!r} without this warning.",
            AnswerWarning,
        )
    return chosen


def _is_one(ids: list[int] | None, tokenizer: Any, text: str) -> TypeGuard[list[int]]:
    """Whether these ids are one token, which the vocabulary has."""
    if ids is None or len(ids) != 1:
        return False
    return ids[0] != tokenizer.unk_token_id or bool(tokenizer.convert_ids_to_tokens(ids[0]) == text.strip())
