"""Prompts with examples of a task: right ones, and ones whose answers are shuffled."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
from ...model.run.hooked import HookedModel

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
        token = first_token(model, template, answer)
        wrong = _deranged([example_answer for _, example_answer in examples], drawn)
        asks = template.partition("{y}")[0].format(x=question).rstrip(" ")
        for prompts, given_answers in ((right, [y for _, y in examples]), (shuffled, wrong)):
            shown = "".join(template.format(x=x, y=y) for (x, _), y in zip(examples, given_answers, strict=True))
            ids = model.encode(shown + asks, bos=bos).ids[0].cpu()
            prompts.append(torch.cat([ids, torch.tensor([token])]))
        answers.append(token)
    return Prompts(right, shuffled, answers)


def first_token(model: HookedModel, template: str, answer: str) -> int:
    """The first token of an answer, with the space that the template puts before it."""
    space = " " if template.partition("{y}")[0].endswith(" ") else ""
    ids = model.encode(space + answer, bos=False).ids[0]
    return int(ids[0])


def _deranged(answers: list[str], drawn: Random) -> list[str]:
    """The answers in another order; none stands where it stood, unless one of them stands at most places."""
    if len(set(answers)) < 2:
        raise InputError(f"shuffled examples need different answers; all are {answers[0]!r}. Give other pairs.")
    for _ in range(1000):
        order = drawn.sample(answers, len(answers))
        if all(now != before for now, before in zip(order, answers, strict=True)):
            return order
    return answers[1:] + answers[:1]
