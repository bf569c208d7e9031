"""Makes the cases of the tasks in `attnmech.demo.tasks`."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Final, TypeAlias

from attnmech.demo.tasks import PER_TEMPLATE, DemoCase

from . import words
from .choices import CHOICES
from .grammar import TRAINING, Document, Relation, document

Template: TypeAlias = Callable[[Document, Relation], str | None]
Writer: TypeAlias = Callable[[Random], Iterator[DemoCase]]

PERIODS: Final = range(6, 22)
GENDERED: Final = ("reason", "wish", "outing", "mishap")
"""The kinds of sentence in which a pronoun stands for someone named alone."""


def cases(task: str, seed: int) -> Iterator[DemoCase]:
    """Yields cases with different texts, until each template of the task has `PER_TEMPLATE`."""
    write, most = TASKS[task]
    by_template: dict[str, set[str]] = {}
    full = 0
    for case in write(Random(seed)):
        texts = by_template.setdefault(case.template, set())
        if case.text not in texts and len(texts) < PER_TEMPLATE:
            yield case
            texts.add(case.text)
            full += len(texts) == PER_TEMPLATE
            if full == most:
                return


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
        choice_at = CHOICES[name]
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

TASKS: Final[dict[str, tuple[Writer, int]]] = {
    "copying": (_copying, len(PERIODS)),
    "agreement": (_from_grammar("verb across 1 attractor", _verb), len(_PLURALS)),
    "gender": (_gender, 2 * len(_ABOUT_SOMEONE)),
    "recipient": (_from_grammar("recipient's name", _giving), len(words.GIVING)),
}
"""The writer of each task, and the number of its templates."""
