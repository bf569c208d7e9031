"""A token that a head may read, and one that it then raises or lowers."""

from dataclasses import dataclass

from ...draw.text import quoted, signed


@dataclass(frozen=True)
class Pair:
    """A token that a head reads, and a token whose logit it then raises or lowers most."""

    layer: int
    head: int
    kind: str
    """"raised" or "lowered"."""
    rank: int
    """The place of the pair among those of its kind, from 0."""
    read: str
    written: str
    logit: float
    """What the head adds to the logit of `written` if it attends only to `read`, above the mean over the vocabulary."""
    read_id: int
    written_id: int

    def __str__(self) -> str:
        return f"{quoted(self.read)} → {quoted(self.written)} {signed(self.logit, '.2f')}"
