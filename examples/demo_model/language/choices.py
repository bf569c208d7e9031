"""Places in a document where one of two words must come next, such as "are" or "is"."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from . import words
from .grammar import Document, Relation, Side, document


@dataclass(frozen=True)
class Choice:
    """A place in a text where one of two words must come next."""

    before: tuple[str, ...]
    """The words that the model sees."""
    right: str
    wrong: str


ChoiceAt = Callable[[Document, Relation], Choice | None]
"""Makes a choice from a relation of its kind in a document; None for any other relation."""


def choices(rng: Random, choice_at: ChoiceAt, side: Side) -> Iterator[Choice]:
    """Yields choices of one kind, without end."""
    while True:
        text = document(rng, sentences=3, side=side)
        for relation in text.relations:
            choice = choice_at(text, relation)
            if choice is not None:
                yield choice


def _recipient(text: Document, relation: Relation) -> Choice | None:
    """When Anna and Tom went to the harbour, Anna gave a shell to ... Tom or Anna?"""
    if relation.relation != "recipient":
        return None
    after = relation.key + 1
    other = text.words[after + 1 if text.words[after] == " and" else relation.key - 2]
    return Choice(text.words[: relation.query + 1], text.words[relation.query + 1], " " + other.strip())


def _number(attractors: int) -> ChoiceAt:
    """The keys beside the cabinet ... are or is? All `attractors` nouns in between have the other number."""

    def choice_at(text: Document, relation: Relation) -> Choice | None:
        right, subject = text.words[relation.query], text.words[relation.key]
        if relation.relation != "subject-verb" or right not in OTHER_NUMBER or subject not in PLURALS | SINGULARS:
            return None
        between = text.words[relation.key + 1 : relation.query]
        numbers = [word in PLURALS for word in between if word in PLURALS | SINGULARS]
        if numbers != [subject not in PLURALS] * attractors:
            return None
        return Choice(text.words[: relation.query], right, OTHER_NUMBER[right])

    return choice_at


def _gender(text: Document, relation: Relation) -> Choice | None:
    """Aunt Anna lost ... her or his? The first pronoun for someone who was named alone."""
    right = text.words[relation.query]
    if relation.relation != "pronoun-antecedent" or right not in OTHER_GENDER:
        return None
    earlier = [r.query for r in text.relations if r.relation == "pronoun-antecedent" and r.query < relation.query]
    if any(query > relation.key for query in earlier) or " met" in text.words[: relation.query][relation.key - 2 :]:
        return None
    return Choice(text.words[: relation.query], right, OTHER_GENDER[right])


def _closing(text: Document, relation: Relation) -> Choice | None:
    """The keys (made by Tom ... ) or ]?"""
    right = text.words[relation.query]
    pair = tuple(words.BRACKETS.values())
    if relation.relation != "bracket" or right not in pair:
        return None
    return Choice(text.words[: relation.query], right, next(word for word in pair if word != right))


PLURALS = {" " + noun.plural for noun in words.things()}
SINGULARS = {" " + noun.singular for noun in words.things()}
OTHER_NUMBER = {f" {verb.singular}": f" {verb.plural}" for verb in words.LINKING + words.RESTING}
OTHER_NUMBER |= {plural: singular for singular, plural in OTHER_NUMBER.items()}
OTHER_GENDER = {" her": " his", " she": " he", " She": " He", " herself": " himself"}
OTHER_GENDER |= {male: female for female, male in OTHER_GENDER.items()}

CHOICES: dict[str, ChoiceAt] = {
    "recipient's name": _recipient,
    "verb without attractor": _number(0),
    "verb across 1 attractor": _number(1),
    "verb across 2 attractors": _number(2),
    "pronoun's gender": _gender,
    "closing bracket": _closing,
}
