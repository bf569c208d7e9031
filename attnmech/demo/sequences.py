"""The sequences that the demo model is trained and tried on."""

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from attnmech.demo.grammar import document
from attnmech.demo.tokenizer import FIRST_WORD, token_ids


def repeated_tokens(
    tokenizer: PreTrainedTokenizerFast, rng: Random, *, length: int = 64, period: int = 20
) -> list[int]:
    """`<s>`, then `period` random words again and again: predictable from the second copy on only.

    >>> from attnmech.demo.tokenizer import build_tokenizer
    >>> tokens = repeated_tokens(build_tokenizer(), Random(0), length=7, period=3)
    >>> tokens[1:4] == tokens[4:7]
    True
    """
    span = [rng.randrange(FIRST_WORD, len(tokenizer)) for _ in range(period)]
    return [_bos(tokenizer), *(span[position % period] for position in range(length - 1))]


def document_tokens(tokenizer: PreTrainedTokenizerFast, rng: Random, *, length: int = 64) -> list[int]:
    """`<s>`, then the first words of a generated document (more than one where one is too short)."""
    tokens = [_bos(tokenizer)]
    while len(tokens) < length:
        tokens += token_ids(tokenizer, document(rng).words)
    return tokens[:length]


def batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: Random,
    *,
    size: int = 32,
    length: int = 64,
    repeated: float = 0.3,
) -> Tensor:
    """Token ids [batch position] of one training step; a share `repeated` is random words that repeat."""
    rows = []
    for _ in range(size):
        if rng.random() < repeated:
            rows.append(repeated_tokens(tokenizer, rng, length=length, period=rng.randint(10, 30)))
        else:
            rows.append(document_tokens(tokenizer, rng, length=length))
    return torch.tensor(rows)


def _bos(tokenizer: PreTrainedTokenizerFast) -> int:
    assert isinstance(tokenizer.bos_token_id, int)
    return tokenizer.bos_token_id
