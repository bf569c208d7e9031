"""Claims types of heads by what they write: copy suppression, and successors.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import Any, Final, NamedTuple

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from ...draw.chart import Chart, table_of_heads
from ...draw.text import plotly_text, quoted, signed, visible_token
from ...maths.intervals import LEAST_TEXTS, LEVEL, exact_interval

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

LEAST_TOKENS: Final = 4  # a class in one spelling counts with at least this many words that are single tokens
_BEFORE: Final = ("", " ", "Ġ", "▁")  # a name's beginning: no space, or one (as is, byte-level, SentencePiece)


@dataclass(frozen=True)
class Steps:
    """The steps from a word to its successor that a vocabulary holds, in all spellings."""

    names: tuple[str, ...]  # the words of each step: "monday → tuesday"
    ids: Int[Tensor, " token"]  # the tokens of all spellings of all classes, in the order of the class
    spelling: Int[Tensor, " token"]  # the number of the class and spelling to which a token belongs
    at: Int[Tensor, " pair"]  # the index of each token whose successor is the next of `ids`
    step: Int[Tensor, " pair"]  # the index of the step in `names`

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
        return of_pairs.new_zeros(*of_pairs.shape[:-1], len(self.names)).index_add_(-1, self.step, of_pairs)


@dataclass(frozen=True)
class Successors:
    """How often each head raises the successor of a token most, by step."""

    steps: tuple[str, ...]
    """The steps between words that the vocabulary holds as single tokens, such as "monday → tuesday"; empty if these
    are too few."""
    raised: Int[Tensor, "measured head step"]  # in how many spellings a head raises the successor most in its class
    spellings: Int[Tensor, " step"]  # the number of spellings: with and without a leading space, capitalised or not
    by_chance: Float[Tensor, " step"]  # `raised` by chance

    @property
    def share(self) -> Float[Tensor, "measured head"]:
        """The mean over steps of the share of spellings; NaN without steps."""
        return (self.raised / self.spellings.double()).mean(dim=-1)

    @property
    def chance(self) -> float:
        """`share` by chance; NaN without steps."""
        return float((self.by_chance / self.spellings).mean())


@dataclass(frozen=True)
class Pair:
    """A token that a head reads, and a token whose logit it then raises or lowers most."""

    layer: int
    head: int
    kind: str  # "raised" or "lowered"
    rank: int  # the place of the pair among those of its kind, from 0
    read: str
    written: str
    logit: float  # added to the logit of `written` if the head attends only to `read`, minus the vocabulary's mean
    read_id: int
    written_id: int

    def __str__(self) -> str:
        return f"{quoted(self.read)} → {quoted(self.written)} {signed(self.logit, '.2f')}"


def pairs_chart(pairs: Sequence[Sequence[Sequence[Pair]]], kind: str) -> Chart:
    """The pairs of each layer and head, with columns for the token read, the token written, and the logit."""
    columns: dict[str, Callable[[Pair], str]] = {
        "reads": lambda pair: plotly_text(visible_token(pair.read)),
        kind: lambda pair: plotly_text(visible_token(pair.written)),
        "logit": lambda pair: signed(pair.logit, ".2f"),
    }
    texts = {
        name: [[[column(pair) for pair in of_head] for of_head in of_layer] for of_layer in pairs]
        for name, column in columns.items()
    }
    return table_of_heads(texts, 60 + 26 * len(pairs[0][0]))


TYPES: Final = {"copy suppression": "suppressed", "successor": "successor"}  # the types, with the statistic of each
LEAST_SHARE: Final = 0.5  # a claim needs at least this share of tokens


class Shares(NamedTuple):
    """A share of tokens for each head."""

    share: Float[Tensor, "measured head"]
    tokens: int  # the number of tokens that count as independent
    chance: float


def claimed(shares: Mapping[str, Shares], layers: Sequence[int]) -> pd.DataFrame:
    """One row per claim, the highest share first. Intervals hold for all heads and types together.

    >>> import torch
    >>> found = {"successor": Shares(torch.tensor([[0.3, 1.0]]), 20, 0.1)}
    >>> claimed(found, [3])[["layer", "head", "type", "score", "baseline"]].values.tolist()
    [[3, 1, 'successor', 1.0, 0.1]]
    """
    rows = []
    heads = sum(share.numel() for share, *_ in shares.values())
    for name, (share, tokens, chance) in shares.items():
        low, high = exact_interval(share, tokens, (1 - LEVEL) / heads)
        for place in map(tuple, ((low > chance) & (share >= LEAST_SHARE)).nonzero().tolist()):
            numbers = float(share[place]), chance, float(low[place]), float(high[place])
            rows.append((layers[place[0]], place[1], name, *numbers, tokens))
    return pd.DataFrame(rows, columns=_COLUMNS).sort_values("score", ascending=False, ignore_index=True, kind="stable")


_COLUMNS: Final = ["layer", "head", "type", "score", "baseline", "score_low", "score_high", "tokens"]
