"""Who and what a document of the demo language is about: the people and themes that recur in it."""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from . import words
from .dice import Dice
from .words import Noun, Pronouns, Theme

Gender = Literal["female", "male"]

MOST_PEOPLE, MOST_THEMES = 4, 3


@dataclass(frozen=True)
class Side:
    """One side of the split: the names and the pairs of nouns that its documents may contain.

    >>> rose, apple = words.THEMES[0].nouns[:2]
    >>> TRAINING.allows(rose, apple), HELD_OUT.allows(rose, apple)
    (True, False)
    """

    female: tuple[str, ...]
    male: tuple[str, ...]
    untold: tuple[str, ...]
    names_tell: bool
    """Whether a name of `female` or `male` reveals the gender; if not, a title does."""
    pairs: frozenset[int]
    """The parts (of eight) of all pairs of nouns that belong to this side."""

    def allows(self, subject: Noun, attractor: Noun) -> bool:
        """Whether a subject may have this noun between itself and its verb."""
        places = _places()
        return (3 * places[subject] + places[attractor]) % 8 in self.pairs

    @property
    def names(self) -> tuple[str, ...]:
        """Everyone who may appear."""
        return self.female + self.male + self.untold

    def gender_of(self, name: str) -> Gender | None:
        """The gender of a name; None for a name of either gender."""
        return "female" if name in self.female else "male" if name in self.male else None


TRAINING = Side(words.FEMALE, words.MALE, words.UNTOLD, True, frozenset(range(1, 8)))
HELD_OUT = Side(words.UNSEEN[:12], words.UNSEEN[12:], (), False, frozenset({0}))


@dataclass
class Person:
    """Someone in a document."""

    name: str
    gender: Gender | None
    tells: bool
    """Whether the name reveals the gender."""
    title: str | None = None

    def addressed(self, dice: Dice) -> str:
        """The person's title, the same each time; chosen at first use, as is the gender if nothing has revealed it."""
        if self.gender is None:
            gender: Gender = dice.choose(("female", "male"))
            self.gender = gender
        self.title = self.title or dice.choose(words.TITLES[self.gender])
        return self.title

    @property
    def pronouns(self) -> Pronouns:
        """The words that stand for this person, whose gender must be known by now."""
        assert self.gender is not None
        return words.PRONOUNS[self.gender]


@dataclass
class Scene:
    """The people and themes mentioned so far; each choice shows in the text as soon as it is written."""

    side: Side
    people: list[Person] = field(default_factory=list)
    themes: list[Theme] = field(default_factory=list)

    def person(self, dice: Dice, *, gender: Gender | None = None, besides: Person | None = None) -> Person:
        """Someone already mentioned, or someone new; of the given gender, if any."""
        known = [p for p in self.people if p is not besides and (gender is None or p.gender == gender)]
        if known and (len(self.people) >= MOST_PEOPLE or dice.chance(0.6)):
            return dice.choose(known)
        names = self.side.names if gender is None else getattr(self.side, gender)
        taken = {person.name for person in self.people}
        name = dice.choose([name for name in names if name not in taken])
        revealed = self.side.gender_of(name)
        self.people.append(Person(name, revealed, self.side.names_tell and revealed is not None))
        return self.people[-1]

    def theme(self, dice: Dice) -> Theme:
        """A theme already mentioned, or a new one."""
        if self.themes and (len(self.themes) >= MOST_THEMES or dice.chance(0.75)):
            return dice.choose(self.themes)
        self.themes.append(dice.choose([theme for theme in words.THEMES if theme not in self.themes]))
        return self.themes[-1]

    def noun(self, dice: Dice, theme: Theme, *, beside: Noun | None = None) -> Noun:
        """A noun of the theme; if `beside` is given, one that may stand between that noun and its verb."""
        return dice.choose(theme.nouns if beside is None else _partners(self.side, theme, beside))


@cache
def _partners(side: Side, theme: Theme, subject: Noun) -> tuple[Noun, ...]:
    return tuple(noun for noun in theme.nouns if noun != subject and side.allows(subject, noun))


@cache
def _places() -> dict[Noun, int]:
    return {noun: place for place, noun in enumerate(words.things())}
