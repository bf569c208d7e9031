"""Finds the row of attention that tells most about each head on one text, and the head that a page shows first."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float32

from ..basics.nouns import TEXT
from ..draw.numbers import ScoreNumbers
from ..draw.text import isolated, percent, visible_token
from ..methods.head_types.formulas import targets

HALF: Final = 0.5  # a row is told of a head if one key receives at least this share of its attention

LEAST: Final = 0.05  # a page begins with a row if one key receives at least this share of its attention

ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class TellingRow:
    """A row of attention and the key that receives most of it."""

    query: int
    key: int
    share: float
    sentence: str  # from which token to which, with the share, as the end of a sentence


@dataclass(frozen=True)
class TellingRows:
    """The row of each head, and of all heads, that gives one key the most attention.

    A key counts if it is a word other than the first token, the row's own and its neighbours, in a row of a word. A key
    that is an earlier copy of the row's token, or follows one, comes before all others if it receives half of the row.
    """

    view: ScoreNumbers

    def of_head(self, layer: int, head: int) -> TellingRow | None:
        """The row of one of the layers shown, by its place; None if no key receives half of a row."""
        row = self._row(self.view.pattern[layer, head])
        return row if row is not None and row.share >= HALF else None

    @property
    def first(self) -> tuple[int, int, TellingRow] | None:
        """The place of a layer, the head, and the row that a page shows first; None if no key receives enough."""
        pattern = self.view.pattern
        heads = pattern.reshape(-1, *pattern.shape[2:])
        row = self._row(heads.max(axis=0))
        if row is None or row.share < LEAST:
            return None
        return *divmod(int(heads[:, row.query, row.key].argmax()), pattern.shape[1]), row

    def _row(self, pattern: Float32[np.ndarray, "query key"]) -> TellingRow | None:
        copied, counted = (np.where(keys, pattern, 0.0) for keys in (self._copied, self._counted))
        shares = copied if copied.max(initial=0.0) >= HALF else counted
        if not shares.max(initial=0.0) > 0:
            return None
        query, key = map(int, np.unravel_index(shares.argmax(), shares.shape))
        share = float(shares[query, key])
        return TellingRow(query, key, share, f"{self._told(query, key)}: {percent(share, 0)}")

    def _told(self, query: int, key: int) -> str:
        view = self.view
        of_query = _named(view.key_tokens, view.first + query) if view.nouns.rows else _named(view.tokens, query)
        words = f"from {of_query} to {_named(view.key_tokens, key)}"
        if view.crosses and not view.nouns.rows:
            return f"{words} of the {view.nouns.key_text}"
        follows = (
            not view.crosses
            and self._copied[query, key]
            and view.tokens[key - 1] == view.tokens[query] != view.tokens[key]
        )
        return f"{words}, the {view.nouns.token} after {_named(view.tokens, key - 1)}" if follows else words

    @cached_property
    def _counted(self) -> Bool[np.ndarray, "query key"]:
        view = self.view
        keys = self._words(view.key_tokens, view.key_special if view.crosses else view.special)
        if view.crosses and not view.nouns.rows:
            return np.broadcast_to(keys, view.pattern.shape[2:])
        keys[0] = False
        places = np.arange(len(keys))
        distance = np.abs(np.subtract.outer(places[-len(view.tokens) :], places))
        counted: Bool[np.ndarray, "query key"] = self._words(view.tokens, view.special)[:, None] & keys & (distance > 1)
        return counted

    @cached_property
    def _copied(self) -> Bool[np.ndarray, "query key"]:
        """The keys that count and are earlier copies of the row's token, or follow one."""
        view = self.view
        if view.crosses or view.nouns.text != TEXT.text:
            return np.zeros(view.pattern.shape[2:], dtype=bool)
        length = len(view.tokens)
        _, ids = np.unique(np.array(view.tokens, dtype=object).astype(str), return_inverse=True)
        causal = not np.triu(view.pattern, 1).any()
        first = torch.arange(length)[None] == 0
        kinds = targets(torch.from_numpy(ids)[None], first, {}, range(length), length, causal=causal)
        copied: Bool[np.ndarray, "query key"] = (kinds["duplicate"] | kinds["induction"])[0].numpy() & self._counted
        return copied

    def _words(self, tokens: tuple[str, ...], special: tuple[bool, ...]) -> Bool[np.ndarray, " position"]:
        """The positions with a letter or a digit that are not special tokens; in an image or a recording, all."""
        words: Bool[np.ndarray, " position"] = ~np.array(special or [False] * len(tokens))
        if self.view.nouns.text == TEXT.text:
            words &= np.array([any(map(str.isalnum, token)) for token in tokens])
        return words


def _named(tokens: tuple[str, ...], position: int) -> str:
    """A token in quotation marks and, if the text has it more than once, which of them it is.

    >>> tokens = ("<s>", "Tom", " saw", " Tom", " run")
    >>> _named(tokens, 3), _named(tokens, 2)
    ('the second “Tom”', '“saw”')
    """
    texts = [visible_token(token).removeprefix("·") or "·" for token in tokens]
    shown, number = f"“{isolated(texts[position])}”", texts[:position].count(texts[position])
    if texts.count(texts[position]) == 1:
        return shown
    return f"the {ORDINALS[number]} {shown}" if number < len(ORDINALS) else f"{shown} ({position})"
