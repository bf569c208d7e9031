"""One example row of a head's attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A row of a head's attention, with the tokens around its query."""

    layer: int
    head: int
    kind: str  # "strongest", "even" or "odd" (the strongest of texts with even or odd numbers), "random" or "band"
    band: str  # the fifth of the head's rows to which the row belongs; empty for rows of another kind
    rank: int  # the place of the row among those of its kind (and band), from 0
    value: float  # the statistic of the row
    text: int  # the number of the text in its corpus
    position: int  # the position of the query among the tokens of its text
    relation: str
    """What the key of highest attention is to the query: the first that is true of "itself", "first token" (of the
    text), "previous token", "next token", "same token" (as the query, farther back), "2–8 back", "farther back" and
    "later"; or "not a token". With `by="attention"`, the key of highest attention among those that count: neither the
    query nor the first token. "no key" if no such key has weight. Empty in cross-attention."""
    tokens: tuple[str, ...]  # up to 24 tokens before the query, the query, and up to 8 tokens after it
    query_at: int  # the index of the query in `tokens`
    weights: tuple[float, ...]
    """For each of `tokens`, the attention that the query gives to it; NaN if it is not one of the eight highest keys.
    In cross-attention all are NaN, since keys are tokens of another text."""
    keys: tuple[int, ...]  # the positions of up to eight keys with the highest attention, highest first
    key_tokens: tuple[str, ...]
    key_weights: tuple[float, ...]

    @property
    def window(self) -> str:
        """The tokens as text, with the query in brackets."""
        before, query, after = (
            "".join(self.tokens[part])
            for part in (slice(self.query_at), slice(self.query_at, self.query_at + 1), slice(self.query_at + 1, None))
        )
        bare = query.lstrip() or query
        return f"{before}{query.removesuffix(bare)}[{bare}]{after}"

    def before(self, key: int) -> str:
        """The token before a key of the same text; empty if it is not among `tokens`."""
        at = key - 1 - self.position + self.query_at
        return self.tokens[at] if 0 <= at < len(self.tokens) else ""

    def __str__(self) -> str:
        keys = zip(self.key_tokens[:3], self.key_weights, self.keys, strict=False)
        named = ", ".join(f"{text.strip()!r} {weight:.2f} (at {place})" for text, weight, place in keys)
        return f"{self.value:.2f}: {self.window} → {named}"
