"""What goes into a run: a batch of tokens, with what a reader needs to know of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Token ids of equal length with what a reader needs to know of them.

    Of images the positions are the class token and the patches, and the ids their numbers.
    """

    ids: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    """True at real tokens, False at padding."""
    tokens: tuple[tuple[str, ...], ...]
    """Each token as text, padding included."""
    bos: bool | None
    """Whether every sequence begins with a token that the tokenizer puts there; None without a tokenizer."""
    target: "Batch | None" = None
    """What the decoder of an encoder-decoder model is given."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model, such as token types, or the pixel values of images."""
    answers: Int[Tensor, " batch"] | None = None
    """The token that each text should go on with, where a metric was given some; and what it stands against."""
    against: Int[Tensor, " batch"] | None = None
    special: frozenset[int] = frozenset()
    """The ids of the tokenizer's special tokens."""
    texts_of: Callable[[Sequence[int]], tuple[str, ...]] | None = None
    """The text of any token ids; None where positions are no tokens, as of images."""

    def queries(self, stack: str = "") -> "Batch":
        """The tokens that look, in one stack of the model."""
        return self.target if stack in ("decoder", "cross") and self.target is not None else self

    def keys(self, stack: str = "") -> "Batch":
        """The tokens that are looked at."""
        return self.target if stack == "decoder" and self.target is not None else self

    def beginning(self, length: int) -> "Batch":
        """The first tokens of every text; what the decoder is given stays whole."""
        return self.part(0, length)

    def part(self, start: int, length: int) -> "Batch":
        """So many tokens of every text from `start` on; a first token that the tokenizer put there stays in front."""
        first = 1 if self.bos and start > 0 else 0
        start = max(start, first)
        places = [*range(first), *range(start, min(start + length - first, self.ids.shape[1]))]
        return replace(
            self,
            ids=self.ids[:, places],
            mask=self.mask[:, places],
            tokens=tuple(tuple(row[place] for place in places) for row in self.tokens),
            extra={name: value[:, places] for name, value in self.extra.items()},
        )

    def texts(self, chosen: Int[Tensor, " text"]) -> "Batch":
        """Some of the texts, any of them several times."""
        chosen = chosen.to(self.ids.device)
        # Further inputs of one row are those of every text.
        extra = {name: value[chosen] if len(value) == len(self.ids) else value for name, value in self.extra.items()}
        return replace(
            self,
            ids=self.ids[chosen],
            mask=self.mask[chosen],
            tokens=tuple(self.tokens[row] for row in chosen.tolist()),
            target=None if self.target is None else self.target.texts(chosen),
            extra=extra,
        )

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Number of real tokens of every sequence."""
        return self.mask.sum(dim=1)

    @property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return not bool(self.mask.all())
