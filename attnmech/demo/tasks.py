"""Makes cases of the tasks that the demo model can do: a text, the next word, a wrong next word, and a template.

`copying`: random words that repeat (a template for each period). `agreement`: a verb after a noun whose number is
not the subject's (a template for each verb). `gender`: the first pronoun for the only person named (a template for each
verb and pronoun). `recipient`: the person who receives something (a template for each verb of giving).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from ..basics.arguments import whole_number
from ..errors import InputError
from . import words
from .evaluate import CHOICES, ChoiceAt
from .grammar import TRAINING, Document, Relation, document

Template: TypeAlias = Callable[[Document, Relation], str | None]
Writer: TypeAlias = Callable[[Random], "Iterator[DemoCase]"]

PERIODS: Final = range(6, 22)
GENDERED: Final = ("reason", "wish", "outing", "mishap")
"""The kinds of sentence in which a pronoun stands for someone named alone."""

_TRIES: Final = 1000
"""The number of cases to make for each case that a template needs, before giving up."""


@dataclass(frozen=True)
class DemoCase:
    """One case."""

    text: str
    right: str
    wrong: str
    template: str


def cases_of(task: str, templates: int | None = None, count: int = 4, seed: int = 0) -> list[DemoCase]:
    """Cases of a task, `count` of every template, for the first `templates` with enough cases: by default 12, or all.

    >>> case = cases_of("agreement")[-1]
    >>> case.text, case.right, case.wrong, case.template
    ('The monitors from the calendar', ' were', ' was', 'were')
    """
    if task not in TASKS:
        raise InputError(f"the demo model's tasks are {', '.join(TASKS)}; got {task!r}.")
    wanted = whole_number("templates", templates or min(12, MOST[task]), least=1, most=MOST[task])
    return _filled(TASKS[task](Random(seed)), wanted, whole_number("count", count, least=1))


def _filled(cases: Iterator[DemoCase], templates: int, count: int) -> list[DemoCase]:
    """Collects cases with different texts until enough templates have enough cases."""
    by_template: dict[str, dict[str, DemoCase]] = {}
    for tried, case in enumerate(cases):
        of_template = by_template.setdefault(case.template, {})
        if len(of_template) < count:
            of_template.setdefault(case.text, case)
        full = [name for name, of_template in by_template.items() if len(of_template) == count]
        if len(full) >= templates:
            return [case for name in sorted(full) for case in by_template[name].values()]
        if tried > _TRIES * count:
            break
    raise InputError(
        f"only {len(full)} templates of this task have {count} different cases; ask for fewer than {templates}."
    )


def _copying(rng: Random) -> Iterator[DemoCase]:
    """Random words, and the first of them again: the next word is the one that followed the last word before."""
    known = sorted(set(words.plain_words()))
    while True:
        period = rng.choice(PERIODS)
        span = [f" {word}" for word in rng.sample(known, period)]
        again = rng.randint(3, period - 2)
        wrong = rng.choice([word for place, word in enumerate(span) if place not in (again - 1, again)])
        yield DemoCase("".join(span + span[:again]), span[again], wrong, f"period {period}")


def _from_grammar(name: str, template: Template) -> Writer:
    """The cases of an entry of `CHOICES` in fresh documents."""

    def cases(rng: Random) -> Iterator[DemoCase]:
        choice_at: ChoiceAt = CHOICES[name]
        while True:
            text = document(rng, sentences=2, side=TRAINING)
            for relation in text.relations:
                choice, of = choice_at(text, relation), template(text, relation)
                if choice is not None and of is not None:
                    yield DemoCase("".join(choice.before), choice.right, choice.wrong, of)

    return cases


def _verb(text: Document, relation: Relation) -> str:
    """The verb that agrees, in its plural form."""
    right = text.words[relation.query]
    return _PLURALS.get(right, right).strip()


def _giving(text: Document, relation: Relation) -> str | None:
    """The verb of giving in the sentence."""
    before = text.words[: relation.query]
    return next((_GIVING[word] for word in reversed(before) if word in _GIVING), None)


def _gender(rng: Random) -> Iterator[DemoCase]:
    """Pronouns in sentences of each kind."""
    choice_at = CHOICES["pronoun's gender"]
    while True:
        kind = rng.choice(GENDERED)
        text = document(rng, sentences=1, kinds=[kind], side=TRAINING)
        for relation in text.relations:
            choice = choice_at(text, relation)
            if choice is not None:
                verb = text.words[relation.key + 1].strip()
                yield DemoCase("".join(choice.before), choice.right, choice.wrong, f"{verb} …{choice.right}")


_PLURALS: Final = {f" {verb.singular}": f" {verb.plural}" for verb in words.LINKING + words.RESTING}
_GIVING: Final = {f" {form}": verb.plural for verb in words.GIVING for form in (verb.plural, verb.past)}

_ABOUT_SOMEONE: Final = (*words.LOSING, *words.ARRIVING, *words.REFLEXIVE, "wanted", "decided")

MOST: Final = {
    "copying": len(PERIODS),
    "agreement": len(_PLURALS),
    "gender": 2 * len(_ABOUT_SOMEONE),
    "recipient": len(words.GIVING),
}
"""The number of templates of each task."""

TASKS: Final[dict[str, Writer]] = {
    "copying": _copying,
    "agreement": _from_grammar("verb across 1 attractor", _verb),
    "gender": _gender,
    "recipient": _from_grammar("recipient's name", _giving),
}
