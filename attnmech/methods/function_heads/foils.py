"""Compares a head's effect on the right answer with its effect on another answer, which it might as well favour.

Even in a random model, a changed head raises or lowers ln p of all answers together, for instance by making the output
less certain. Formulas: docs/formulas.md#function-heads.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from ...maths.intervals import TextMeans


@dataclass(frozen=True, eq=False)
class AgainstFoils(TextMeans):
    """Means that are clear only if the difference from the foils has the same sign, clearly."""

    foils: TextMeans | None = None
    """The effect on the right answer minus that on the foil; None if it was not measured."""

    @property
    def clear_alone(self) -> Bool[Tensor, "*place"]:
        """Whether the direction of a mean is clear, whatever happens to the foils."""
        return (self.direction != 0) & (self.direction == self.mean.sign())

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether the direction is clear, and the same against the foils."""
        return self.clear_alone if self.foils is None else self.clear_alone & (self.foils.direction == self.direction)

    @property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """Whether the size is clear, and against the foils too, with the same sign."""
        alone = TextMeans(self.above, self.below).clear_size
        if self.foils is None:
            return alone
        return alone & self.foils.clear_size & (self.foils.mean.sign() == self.mean.sign())

    def texts_needed(self, at: tuple[int, ...]) -> int | None:
        """As for other means; None where texts are not what is missing."""
        return None if bool(self.clear_alone[at]) else super().texts_needed(at)


def foils_of(prompts: Sequence[Sequence[int]], answers: Sequence[int]) -> list[int | None]:
    """Returns another prompt's answer for each prompt: one that occurs in the prompt as often as the right answer.

    Every answer is the foil about as often as the others, so that no answer decides the sign of many differences. None
    where no answer occurs as often.

    >>> foils_of([[7, 1], [7, 2], [1, 3]], [1, 2, 3])
    [2, 3, 2]
    """
    distinct = list(dict.fromkeys(answers))
    used: Counter[int] = Counter()
    foils: list[int | None] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        shown = Counter(prompt[:-1])
        start = distinct.index(answer) + 1
        others = [
            foil for foil in distinct[start:] + distinct[:start] if foil != answer and shown[foil] == shown[answer]
        ]
        foil = min(others, key=lambda other: used[other], default=None)
        foils.append(foil)
        if foil is not None:
            used[foil] += 1
    return foils
