"""Counts the tokens of ordered classes (Monday, Tuesday, …) whose successor is the token that a head raises most.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import Any, Final

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from ...maths.intervals import LEAST_TEXTS

CLASSES: Final[tuple[Sequence[str], ...]] = (
    digits,
    ascii_lowercase,
    (
        "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
    ),
    ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    (
        "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
        "december",
    ),
)  # fmt: skip
"""The words of each class, in order. The last word of a class has no successor."""

LEAST_TOKENS: Final = 4
"""A class in one spelling counts if the vocabulary holds at least this number of its words as single tokens."""

_BEFORE: Final = ("", " ", "Ġ", "▁")
"""How the names of tokens begin: without a space, or with one (as such, or in byte-level and SentencePiece
tokenizers)."""


@dataclass(frozen=True)
class Steps:
    """The steps from a word to its successor that a vocabulary holds, in all spellings."""

    names: tuple[str, ...]
    """The words of each step: "monday → tuesday"."""
    ids: Int[Tensor, " token"]
    """The tokens of all spellings of all classes, in the order of the class."""
    spelling: Int[Tensor, " token"]
    """The number of the class and spelling to which a token belongs."""
    at: Int[Tensor, " pair"]
    """The index of each token whose successor is the next of `ids`."""
    step: Int[Tensor, " pair"]
    """The index of the step in `names`."""

    @classmethod
    def of(cls, tokenizer: Any, vocab: int) -> "Steps":
        """The steps between single tokens below `vocab`; none if there are too few for an interval.

        >>> import attnmech as am
        >>> Steps.of(am.load().tokenizer, 3842).names[:2]
        ('one → two', 'two → three')
        """
        known = {} if tokenizer is None else tokenizer.get_vocab()
        ids, spelling, at, steps = list[int](), list[int](), list[int](), list[str]()
        for words in CLASSES:
            capitalised = [word.capitalize() for word in words]
            for spelled in (words, capitalised) if list(words) != capitalised else (words,):
                for before in _BEFORE:
                    tokens = [known.get(before + word, vocab) for word in spelled]
                    held = [place for place, token in enumerate(tokens) if token < vocab]
                    if len(held) < LEAST_TOKENS:
                        continue
                    for index, (place, following) in enumerate(pairwise(held)):
                        if following == place + 1:
                            at.append(len(ids) + index)
                            steps.append(f"{words[place]} → {words[following]}")
                    spelling += [1 + max(spelling, default=-1)] * len(held)
                    ids += [tokens[place] for place in held]
        names = tuple(dict.fromkeys(steps))
        if len(names) < LEAST_TEXTS:
            return cls((), *(torch.zeros(0, dtype=torch.long) for _ in range(4)))
        numbers = [names.index(step) for step in steps]
        return cls(names, *(torch.tensor(entries) for entries in (ids, spelling, at, numbers)))

    def raised(
        self,
        values: Float[Tensor, "kv token d_value"],
        W_O: Float[Tensor, "head d_value d_model"],
        directions: Callable[[Tensor], Tensor],
    ) -> Int[Tensor, "head step"]:
        """For each step, the number of spellings in which v W_O·d_a is highest at the successor, of all a of the class
        in this spelling; a tie does not count.

        Args:
            values: v of each token of `ids`.
            W_O: the output weights of the heads, which share values in groups.
            directions: a function of ids that returns d `[id d_model]`.
        """
        values = values.repeat_interleave(len(W_O) // len(values), dim=0)
        written = einsum(
            W_O, directions(self.ids.to(W_O.device)), "head d_value d_model, id d_model -> head d_value id"
        )
        logits, at = values @ written, self.at.to(W_O.device)
        spelling = self.spelling.to(W_O.device)
        others = (spelling[:, None] != spelling)[at]
        of_pairs = logits[:, at].masked_fill(others, -torch.inf)
        successor = logits[:, at, at + 1]
        most = (of_pairs >= successor[..., None]).sum(dim=-1) == 1
        return self._by_step(most.long().cpu())

    @property
    def spellings(self) -> Int[Tensor, " step"]:
        """The number of spellings in which the vocabulary holds each step."""
        return self._by_step(torch.ones_like(self.step))

    @property
    def by_chance(self) -> Float[Tensor, " step"]:
        """The mean of `raised` for a head that raises each token of a class most equally often: Σ 1 / (tokens)."""
        tokens = torch.bincount(self.spelling)[self.spelling[self.at]]
        return self._by_step(1 / tokens.double())

    def _by_step(self, of_pairs: Tensor) -> Tensor:
        """Sums over the spellings of each step."""
        return of_pairs.new_zeros(*of_pairs.shape[:-1], len(self.names)).index_add_(-1, self.step, of_pairs)


@dataclass(frozen=True)
class Successors:
    """How often each head raises the successor of a token most, by step."""

    steps: tuple[str, ...]
    """The steps between words that the vocabulary holds as single tokens, such as "monday → tuesday"; empty if these
    are too few."""
    raised: Int[Tensor, "measured head step"]
    """The number of spellings in which a head raises the successor most, of the tokens of the class."""
    spellings: Int[Tensor, " step"]
    """The number of spellings: with and without a leading space, capitalised or not."""
    by_chance: Float[Tensor, " step"]
    """`raised` by chance."""

    @property
    def share(self) -> Float[Tensor, "measured head"]:
        """The mean over steps of the share of spellings; NaN without steps."""
        return (self.raised / self.spellings.double()).mean(dim=-1)

    @property
    def chance(self) -> float:
        """`share` by chance; NaN without steps."""
        return float((self.by_chance / self.spellings).mean())
