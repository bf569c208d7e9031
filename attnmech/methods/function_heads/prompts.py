"""Prompts with examples of a task: right ones, and ones whose answers are shuffled."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
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
