"""Parts of sentences of the demo language, each added to a draft with its relations."""

from . import words
from .dice import Dice
from .draft import Draft
from .scene import Person, Scene
from .words import Noun, Theme, Verb


def add_opening(draft: Draft, dice: Dice) -> None:
    """Perhaps "In the morning,"."""
    if dice.chance(0.25):
        draft.add(*dice.choose(words.OPENINGS))
        draft.comma()


def add_state(draft: Draft, dice: Dice, scene: Scene) -> None:
    """A thing, others near it, and a verb that agrees with the first: "the keys beside the cabinet are rusty"."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    noun, subject = add_thing(draft, dice, scene, theme, plural=plural)
    for _ in range(dice.choose((0, 1, 2), (1.0, 2.0, 1.0))):
        draft.add(dice.choose(words.NEARNESS))
        add_thing(draft, dice, scene, scene.theme(dice), plural=dice.chance(0.5), beside=noun)
    add_predicate(draft, dice, scene, theme, (subject,), plural=plural)


def add_bracketed(draft: Draft, dice: Dice, scene: Scene, theme: Theme) -> None:
    """The content of a bracket: a short phrase without a verb that agrees."""
    choice = dice.choose(("maker", "past", "company", "origin"))
    if choice == "maker":
        draft.add("made", "by")
        draft.name(scene.person(dice).name)
    elif choice == "past":
        draft.add("once", dice.choose(words.ADJECTIVES), "and", dice.choose(theme.adjectives))
    elif choice == "company":
        draft.add("with")
        add_thing(draft, dice, scene, theme, plural=dice.chance(0.5))
    else:
        draft.add("from")
        add_place(draft, dice, theme)


def add_predicate(
    draft: Draft, dice: Dice, scene: Scene, theme: Theme, subjects: tuple[int, ...], *, plural: bool
) -> None:
    """The verb that agrees with the subject, and what follows it."""
    if dice.chance(0.6):
        add_verb(draft, dice.choose(words.LINKING).form(plural), *subjects)
        if dice.chance(0.15):
            draft.add(dice.choose(words.DEGREES))
        draft.add(quality(dice, theme))
    else:
        add_verb(draft, dice.choose(words.RESTING).form(plural), *subjects)
        add_whereabouts(draft, dice, theme)


def add_verb(draft: Draft, verb: str, *subjects: int) -> int:
    """A verb, related to the nouns of its subject."""
    index = draft.add(verb)
    for subject in subjects:
        draft.relate("subject-verb", query=index, key=subject)
    return index


def add_mention(draft: Draft, dice: Dice, person: Person, *, telling: bool = False) -> int:
    """A person's name, perhaps with a title; always with one if the gender must be known (`telling`) and is not."""
    if person.tells:
        titled = dice.chance(0.1)
    else:
        titled = telling
    if titled:
        draft.add(person.addressed(dice))
    return draft.name(person.name)


def add_person(draft: Draft, dice: Dice, scene: Scene) -> tuple[int, words.Pronouns]:
    """A person by name, or "the girl"; with the pronouns that will refer to them."""
    if dice.chance(0.75):
        person = scene.person(dice)
        return add_mention(draft, dice, person, telling=True), person.pronouns
    gender = dice.choose(("female", "male"))
    return draft.add("the", dice.choose(words.GENDERED[gender])), words.PRONOUNS[gender]


def add_actors(draft: Draft, dice: Dice, scene: Scene) -> tuple[tuple[int, ...], bool]:
    """The subject of a deed: one or two people, by name or occupation; and whether it is plural."""
    who = dice.choose(("one", "two", "role"))
    if who == "role":
        plural = dice.chance(0.5)
        return (draft.add("the", dice.choose(words.ROLES).form(plural)),), plural
    first = scene.person(dice)
    subject = draft.name(first.name)
    if who == "one":
        return (subject,), False
    draft.add("and")
    return (subject, draft.name(scene.person(dice, besides=first).name)), True


def add_deed(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Something done in the past: "painted a small boat"."""
    theme = scene.theme(dice)
    add_object(draft, dice, scene, theme, draft.add(dice.choose(verbs_for(dice, theme)).past))


def verbs_for(dice: Dice, theme: Theme) -> tuple[Verb, ...]:
    """Verbs that take any thing as their object, or those of the theme."""
    return dice.choose((words.ACTIONS, theme.verbs))


def add_object(draft: Draft, dice: Dice, scene: Scene, theme: Theme, verb: int) -> None:
    """A thing that something is done to, related to its verb."""
    _, thing = add_thing(draft, dice, scene, theme, plural=dice.chance(0.4))
    draft.relate("verb-object", query=thing, key=verb)


def add_thing(
    draft: Draft,
    dice: Dice,
    scene: Scene,
    theme: Theme,
    *,
    plural: bool,
    plain: bool = False,
    beside: Noun | None = None,
) -> tuple[Noun, int]:
    """An article or number, an optional adjective, and a noun of the theme; returns the noun and its index.

    A plain thing has "the" and no adjective. `beside` is the subject if this noun stands between it and its verb.
    """
    determiner = "the" if plain else dice.choose(*(PLURAL if plural else SINGULAR))
    if determiner == "number":
        determiner = dice.choose(words.NUMBERS)
    count = draft.add(determiner)
    noun, index = add_described(draft, dice, scene, theme, plural=plural, plain=plain, beside=beside)
    if determiner in words.NUMBERS:
        draft.relate("modifier", query=index, key=count)
    return noun, index


SINGULAR = (words.SINGULAR_DETERMINERS, (10.0, 5.0, *(0.5,) * (len(words.SINGULAR_DETERMINERS) - 2)))
PLURAL = (("number", *words.PLURAL_DETERMINERS), (2.0, 10.0, *(0.5,) * (len(words.PLURAL_DETERMINERS) - 1)))


def add_described(
    draft: Draft,
    dice: Dice,
    scene: Scene,
    theme: Theme,
    *,
    plural: bool,
    plain: bool = False,
    beside: Noun | None = None,
) -> tuple[Noun, int]:
    """An optional adjective, and a noun of the theme; returns the noun and its index."""
    modifier = None if plain or dice.chance(0.7) else draft.add(quality(dice, theme))
    noun = scene.noun(dice, theme, beside=beside)
    index = add_noun(draft, theme, noun.form(plural))
    if modifier is not None:
        draft.relate("modifier", query=index, key=modifier)
    return noun, index


def add_noun(draft: Draft, theme: Theme, noun: str) -> int:
    """Write a noun, related to the last of its theme."""
    return draft.add_again(noun, theme.name, "same-theme")


def add_series(draft: Draft, dice: Dice, scene: Scene, between: str) -> list[str]:
    """Write two to four plural nouns with a word or comma between them; returns what was written."""
    written: list[str] = []
    for place in range(dice.choose((2, 3, 4))):
        if place:
            written.append(between)
            draft.add(between)
        theme = scene.theme(dice)
        written.append(scene.noun(dice, theme).plural)
        add_noun(draft, theme, written[-1])
    return written


def add_whereabouts(draft: Draft, dice: Dice, theme: Theme) -> None:
    """At or near a place of the theme."""
    draft.add(dice.choose(words.SPOTS))
    add_place(draft, dice, theme)


def add_place(draft: Draft, dice: Dice, theme: Theme) -> None:
    """The place of a theme."""
    draft.add("the")
    draft.add_again(dice.choose(theme.places), theme.name, "same-theme")


def quality(dice: Dice, theme: Theme) -> str:
    """An adjective that fits a thing of the theme."""
    return dice.choose(dice.choose((words.ADJECTIVES, theme.adjectives)))
