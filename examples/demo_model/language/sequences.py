"""The sequences that the demo model is trained and tested on."""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from attnmech.demo.text import FIRST_WORD

from . import words
from .grammar import document
from .tokenizer import token_ids


def repeated_tokens(
    tokenizer: PreTrainedTokenizerFast, rng: Random, *, length: int = 64, period: int = 20
) -> list[int]:
    """`<s>`, then `period` random words again and again: predictable from the second copy on only.

    >>> from language.tokenizer import build_tokenizer
    >>> tokens = repeated_tokens(build_tokenizer(), Random(0), length=7, period=3)
    >>> tokens[1:4] == tokens[4:7]
    True
    """
    span = [rng.randrange(FIRST_WORD, len(tokenizer)) for _ in range(period)]
    return [_bos(tokenizer), *(span[position % period] for position in range(length - 1))]


def document_tokens(tokenizer: PreTrainedTokenizerFast, rng: Random, *, length: int = 64) -> list[int]:
    """`<s>`, then the first words of a document."""
    return [_bos(tokenizer), *token_ids(tokenizer, _words(rng, length))][:length]


def altered_tokens(tokenizer: PreTrainedTokenizerFast, rng: Random, *, length: int = 64) -> list[int]:
    """`<s>`, then a document in which some words are replaced by others, wherever they occur.

    In one document of four, one word is spelled with random letters; in the others, which are mostly about people,
    everyone has some other word for a name. So the model sees bytes, and learns to recognise names by their position.
    """
    if rng.random() < 0.25:
        text = _words(rng, length)
        known = rng.choice([word for word in text if word.strip().isalpha()])
        unknown = "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))
        spelt = known[: -len(known.strip())] + (unknown.capitalize() if known.istitle() else unknown)
        instead = {known: tokenizer.encode(spelt, add_special_tokens=False)}
    else:
        text = _words(rng, length, ABOUT_PEOPLE)
        new = {name: rng.choice(SUBSTITUTES) for name in words.names()}
        instead = {word: token_ids(tokenizer, [new[word.strip()]]) for word in text if word.strip() in new}
    pieces = [instead.get(word, [token]) for word, token in zip(text, token_ids(tokenizer, text), strict=True)]
    return [_bos(tokenizer), *(token for piece in pieces for token in piece)][:length]


def _words(rng: Random, length: int, kinds: Sequence[str] | None = None) -> tuple[str, ...]:
    """The words of a document that has at least `length` of them."""
    sentences = length // 8
    while len(text := document(rng, sentences=sentences, kinds=kinds).words) < length:
        sentences += 4
    return text


ABOUT_PEOPLE = ("recipient", "meeting", "quotation", "thought", "song", "copy", "list", "rest", "habit", "outing")
"""The kinds of sentences that most often name someone."""

LETTERS = "aaabcdeeefghiijklmnooprsttuvwyz"
"""The letters of unknown words; vowels are more frequent."""

SUBSTITUTES = tuple(" " + word for word in words.plain_words() if word not in words.UNSEEN)
"""Words that may replace names of people; held-out names are excluded."""


def batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: Random,
    *,
    size: int = 32,
    length: int = 128,
    repeated: float = 0.25,
    altered: float = 0.4,
) -> Tensor:
    """Token ids [batch position] of one training step.

    A share `repeated` of the rows are random words that repeat, a share `altered` documents with replaced words.
    """
    rows = []
    for _ in range(size):
        kind = rng.random()
        if kind < repeated:
            rows.append(repeated_tokens(tokenizer, rng, length=length, period=rng.randint(10, 40)))
        elif kind < repeated + altered:
            rows.append(altered_tokens(tokenizer, rng, length=length))
        else:
            rows.append(document_tokens(tokenizer, rng, length=length))
    return torch.tensor(rows)


def _bos(tokenizer: PreTrainedTokenizerFast) -> int:
    assert isinstance(tokenizer.bos_token_id, int)
    return tokenizer.bos_token_id
