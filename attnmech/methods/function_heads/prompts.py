"""Builds the prompts of function heads, and the wrong answers that the right ones are compared with.

Even in a random model, a changed head raises or lowers ln p of all answers together, for instance by making the output
less certain. So its effect on the right answer is compared with its effect on another answer, which it might as well
favour. Formulas: docs/formulas.md#function-heads.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...errors import InputError
from ...maths.intervals import TextMeans
from ...model.run.hooked import HookedModel
from ...runs.in_context import divided

Pair = tuple[str, str]
"""(question, answer)."""


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts; each ends with the first token of the right answer."""

    right: list[Int[Tensor, " position"]]
    """With right examples."""
    shuffled: list[Int[Tensor, " position"]]
    """With the same examples and their answers in another order."""
    answers: list[int]
    """The first token of each prompt's answer."""


def prompts_of(
    model: HookedModel, pairs: Sequence[Pair], shots: int, count: int, template: str, seed: int, bos: bool | None
) -> Prompts:
    """Draws prompts: a question, after `shots` other pairs as examples."""
    drawn = Random(seed)
    right: list[Tensor] = []
    shuffled: list[Tensor] = []
    answers: list[int] = []
    order = list(range(len(pairs)))
    for number in range(count):
        asked = order[number % len(order)]
        others = [pair for place, pair in enumerate(pairs) if place != asked]
        examples = drawn.sample(others, shots)
        while len({y for _, y in examples}) < 2 <= len({y for _, y in others}):
            examples = drawn.sample(others, shots)
        question, answer = pairs[asked]
        wrong = _deranged([example_answer for _, example_answer in examples], drawn)
        asks = template.partition("{y}")[0].format(x=question)
        tokens = set[int]()
        for prompts, given_answers in ((right, [y for _, y in examples]), (shuffled, wrong)):
            shown = "".join(template.format(x=x, y=y) for (x, _), y in zip(examples, given_answers, strict=True))
            ids, token = divided(model, shown + asks, answer, bos)
            prompts.append(torch.tensor([*ids, token]))
            tokens.add(token)
        if len(tokens) > 1:
            raise InputError(f"the first token of {answer!r} depends on the examples before it; give other pairs.")
        answers.append(token)
    return Prompts(right, shuffled, answers)


def _deranged(answers: list[str], drawn: Random) -> list[str]:
    """The answers in another order; none stands where it stood, unless one of them stands at most places."""
    if len(set(answers)) < 2:
        raise InputError(f"shuffled examples need different answers; all are {answers[0]!r}. Give other pairs.")
    for _ in range(1000):
        order = drawn.sample(answers, len(answers))
        if all(now != before for now, before in zip(order, answers, strict=True)):
            return order
    return answers[1:] + answers[:1]


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
