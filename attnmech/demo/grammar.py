"""Sentences of the demo language, with the true relations between their words.

Each function of the table `SENTENCES` writes one kind of sentence into a draft; `document` strings several
together so that names and themes come back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from attnmech.demo import words
from attnmech.demo.draft import Document, Draft, Kind, Relation
from attnmech.demo.words import Noun, Theme, Verb

__all__ = ["SENTENCES", "Document", "Kind", "Relation", "document"]


@dataclass(frozen=True)
class Person:
    """Someone in a document, with the pronouns that stand for them."""

    name: str
    subject: str
    possessive: str


@dataclass(frozen=True)
class Scene:
    """Who and what a document is about."""

    people: tuple[Person, ...]
    themes: tuple[Theme, ...]


def document(rng: Random, *, sentences: int = 6, kinds: Sequence[str] | None = None) -> Document:
    """A text of several sentences about a few people and two themes.

    >>> document(Random(0), sentences=1, kinds=["recipient"]).text
    'After Adam and Henry walked to the station, Henry offered the buses to Adam.'

    `kinds` names the entries of `SENTENCES` to use (all of them by default); each comes once, in any order,
    before one comes again.
    """
    round_ = [SENTENCES[kind] for kind in (kinds or SENTENCES)]
    draft, scene = Draft(), _scene(rng)
    for number in range(sentences):
        if number % len(round_) == 0:
            rng.shuffle(round_)
        round_[number % len(round_)](draft, rng, scene)
    return draft.finish()


def _scene(rng: Random) -> Scene:
    girls = [Person(name, *words.PRONOUNS["girl"]) for name in rng.sample(words.GIRLS, 2)]
    boys = [Person(name, *words.PRONOUNS["boy"]) for name in rng.sample(words.BOYS, 2)]
    return Scene(tuple(rng.sample(girls + boys, 3)), tuple(rng.sample(words.THEMES, 2)))


def _agreement(draft: Draft, rng: Random, scene: Scene) -> None:
    """The keys beside the old cabinet are rusty."""
    theme = rng.choice(scene.themes)
    _opening(draft, rng)
    plural = rng.random() < 0.5
    subject = _thing(draft, rng, theme, plural=plural)
    for _ in range(rng.choice((0, 1, 1, 2))):
        draft.add(rng.choice(words.NEARNESS))
        _thing(draft, rng, theme, plural=rng.random() < 0.5)
    _predicate(draft, rng, theme, subject, plural=plural)
    draft.stop()


def _aside(draft: Draft, rng: Random, scene: Scene) -> None:
    """The keys (a gift from Anna [once small and heavy]) are rusty."""
    theme = rng.choice(scene.themes)
    plural = rng.random() < 0.5
    subject = _thing(draft, rng, theme, plural=plural)
    opening = rng.choice(tuple(words.BRACKETS))
    bracket = draft.add(opening)
    _inside(draft, rng, scene, theme)
    if rng.random() < 0.3:
        inner = next(mark for mark in words.BRACKETS if mark != opening)
        nested = draft.add(inner)
        _inside(draft, rng, scene, theme)
        draft.relate("bracket", query=draft.add(words.BRACKETS[inner]), key=nested)
    draft.relate("bracket", query=draft.add(words.BRACKETS[opening]), key=bracket)
    _predicate(draft, rng, theme, subject, plural=plural)
    draft.stop()


def _inside(draft: Draft, rng: Random, scene: Scene, theme: Theme) -> None:
    """What stands in a bracket: a short phrase without a verb that agrees."""
    choice = rng.randrange(4)
    if choice == 0:
        draft.add("a", "gift", "from")
        draft.name(rng.choice(scene.people).name)
    elif choice == 1:
        draft.add("once", rng.choice(words.ADJECTIVES), "and", rng.choice(theme.adjectives))
    elif choice == 2:
        draft.add("with")
        _thing(draft, rng, theme, plural=rng.random() < 0.5)
    else:
        draft.add("from")
        _place(draft, rng, theme)


def _action(draft: Draft, rng: Random, scene: Scene) -> None:
    """In the morning, Anna painted a small boat at the harbour."""
    theme = rng.choice(scene.themes)
    opened = _opening(draft, rng)
    draft.name(rng.choice(scene.people).name)
    verb = draft.add(rng.choice(words.ACTIONS))
    _object(draft, rng, theme, verb)
    if opened or rng.random() < 0.5:
        _whereabouts(draft, rng, theme)
    else:
        draft.add(rng.choice(words.MOMENTS))
    draft.stop()


def _pronoun(draft: Draft, rng: Random, scene: Scene) -> None:
    """Anna lost her book, so she went to the library."""
    person, theme = rng.choice(scene.people), rng.choice(scene.themes)
    antecedent = draft.name(person.name)
    verb = draft.add(rng.choice(words.LOSING))
    draft.pronoun(person.possessive, antecedent)
    noun, adjective = _pick(rng, theme, plural=rng.random() < 0.5)
    thing = _described(draft, theme, noun, adjective)
    draft.relate("verb-object", query=thing, key=verb)
    draft.comma()
    if rng.random() < 0.5:
        draft.add("because")
        draft.pronoun(person.subject, antecedent)
        draft.add("was", rng.choice(words.FEELINGS))
    else:
        draft.add("so")
        draft.pronoun(person.subject, antecedent)
        draft.add(rng.choice(words.ARRIVING), "to")
        _place(draft, rng, theme)
    draft.stop()


def _recipient(draft: Draft, rng: Random, scene: Scene) -> None:
    """When Anna and Tom went to the harbour, Anna gave a shell to Tom."""
    theme = rng.choice(scene.themes)
    first, second = rng.sample(scene.people, 2)
    draft.add(rng.choice(("when", "after", "while")))
    mentions = {first: draft.name(first.name)}
    draft.add("and")
    mentions[second] = draft.name(second.name)
    draft.add(rng.choice(words.ARRIVING), "to")
    _place(draft, rng, theme)
    draft.comma()
    giver, receiver = rng.sample((first, second), 2)
    draft.name(giver.name)
    verb = draft.add(rng.choice(words.GIVING))
    _object(draft, rng, theme, verb)
    draft.relate("recipient", query=draft.add("to"), key=mentions[receiver])
    draft.name(receiver.name)
    draft.stop()


def _song(draft: Draft, rng: Random, scene: Scene) -> None:
    """Anna sang of boats and stars and owls, of boats and stars and owls."""
    draft.name(rng.choice(scene.people).name)
    draft.add("sang")
    nouns = [noun.plural for noun in rng.sample(scene.themes[0].nouns + scene.themes[1].nouns, rng.randint(2, 4))]
    span = ["of", nouns[0], *(word for noun in nouns[1:] for word in ("and", noun))]
    start = draft.add(span[0])
    draft.add(*span[1:])
    draft.comma()
    for offset, word in enumerate(span):
        draft.relate("repeat", query=draft.add(word), key=start + offset)
    draft.stop()


SENTENCES: dict[str, Callable[[Draft, Random, Scene], None]] = {
    "agreement": _agreement,
    "aside": _aside,
    "action": _action,
    "pronoun": _pronoun,
    "recipient": _recipient,
    "song": _song,
}
"""The kinds of sentences, each a function that writes one into a draft."""


def _opening(draft: Draft, rng: Random) -> bool:
    """Perhaps "In the morning,"; says whether."""
    opened = rng.random() < 0.3
    if opened:
        draft.add(*rng.choice(words.OPENINGS))
        draft.comma()
    return opened


def _predicate(draft: Draft, rng: Random, theme: Theme, subject: int, *, plural: bool) -> None:
    """The verb that agrees with the subject, and what follows it."""
    verb = rng.choice(words.AGREEING)
    draft.relate("subject-verb", query=draft.add(_form(verb, plural=plural)), key=subject)
    if verb in words.LINKING:
        draft.add(_adjective(rng, theme))
    else:
        _whereabouts(draft, rng, theme)


def _object(draft: Draft, rng: Random, theme: Theme, verb: int) -> None:
    """A thing that something is done to, related to its verb."""
    plural = rng.random() < 0.3
    article = "the" if plural or rng.random() < 0.3 else "a"
    thing = _thing(draft, rng, theme, plural=plural, article=article)
    draft.relate("verb-object", query=thing, key=verb)


def _thing(draft: Draft, rng: Random, theme: Theme, *, plural: bool, article: str = "the") -> int:
    """An article, perhaps an adjective, and a noun of the theme; returns the noun's index."""
    noun, adjective = _pick(rng, theme, plural=plural)
    following = adjective or noun
    draft.add("an" if article == "a" and following[0] in "aeiou" else article)
    return _described(draft, theme, noun, adjective)


def _pick(rng: Random, theme: Theme, *, plural: bool) -> tuple[str, str | None]:
    """A noun of the theme and perhaps an adjective for it."""
    noun = _form(rng.choice(theme.nouns), plural=plural)
    return noun, _adjective(rng, theme) if rng.random() < 0.4 else None


def _described(draft: Draft, theme: Theme, noun: str, adjective: str | None) -> int:
    """Write a noun behind its adjective, if it has one; returns the noun's index."""
    modifier = draft.add(adjective) if adjective else None
    index = draft.add_again(noun, theme.name, "same-theme")
    if modifier is not None:
        draft.relate("modifier", query=index, key=modifier)
    return index


def _whereabouts(draft: Draft, rng: Random, theme: Theme) -> None:
    """At or near a place of the theme."""
    draft.add(rng.choice(("at", "near")))
    _place(draft, rng, theme)


def _place(draft: Draft, rng: Random, theme: Theme) -> None:
    """The place of a theme."""
    draft.add("the")
    draft.add_again(rng.choice(theme.places), theme.name, "same-theme")


def _adjective(rng: Random, theme: Theme) -> str:
    return rng.choice(words.ADJECTIVES + theme.adjectives)


def _form(word: Noun | Verb, *, plural: bool) -> str:
    return word.plural if plural else word.singular
