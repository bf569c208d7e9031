"""Sentences of the demo language, with the true relations between their words.

Each function of the table `SENTENCES` writes one kind of sentence into a draft (its docstring is an example);
`document` strings several together so that names and themes recur. Every choice shows in the text, so a
text has one derivation and `Document.surprisal` is −ln of its probability.
"""

from collections.abc import Callable, Sequence
from random import Random

from . import words
from .dice import Dice
from .draft import Document, Draft, Kind, Relation
from .scene import HELD_OUT, TRAINING, Person, Scene, Side
from .words import Noun, Theme, Verb

__all__ = ["HELD_OUT", "SENTENCES", "TRAINING", "Document", "Kind", "Relation", "Side", "document", "tell"]

Writer = Callable[[Draft, Dice, Scene], None]


def document(rng: Random, *, sentences: int = 8, kinds: Sequence[str] | None = None, side: Side = TRAINING) -> Document:
    """A text of several sentences about a few people and themes.

    >>> document(Random(7), sentences=1, kinds=["recipient"]).text
    'As Clara and Frank ran to the bakery, Clara gave the pan to Frank.'

    `kinds` names the entries of `SENTENCES` to draw from (all of them by default; an entry may write two
    sentences). `side` is the side of the split: training texts, or texts with names and pairs of nouns that those
    do not have.
    """
    return tell(Draft(), Dice(rng), sentences=sentences, kinds=kinds, side=side)


def tell(
    draft: Draft, dice: Dice, *, sentences: int = 8, kinds: Sequence[str] | None = None, side: Side = TRAINING
) -> Document:
    """The document that these choices produce, written into an empty draft."""
    writers = [SENTENCES[kind] for kind in (kinds or SENTENCES)]
    scene = Scene(side)
    for _ in range(sentences):
        dice.choose(writers)(draft, dice, scene)
    return draft.finish(dice.surprisal)


# --- things, and what is said about them


def _agreement(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The keys beside the old cabinet are rusty."""
    _opening(draft, dice)
    _state(draft, dice, scene)
    draft.stop()


def _aside(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The keys (made by Anna [once small and heavy]) are rusty."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    _, subject = _thing(draft, dice, scene, theme, plural=plural)
    outer = dice.choose(tuple(words.BRACKETS))
    bracket = draft.open(outer)
    _inside(draft, dice, scene, theme)
    if dice.chance(0.3):
        inner = next(mark for mark in words.BRACKETS if mark != outer)
        nested = draft.open(inner)
        _inside(draft, dice, scene, theme)
        draft.close(inner, nested)
    draft.close(outer, bracket)
    _predicate(draft, dice, scene, theme, (subject,), plural=plural)
    draft.stop()


def _likeness(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The violins were as old as the drum."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    noun, subject = _thing(draft, dice, scene, theme, plural=plural, plain=True)
    _verb(draft, dice.choose((words.BE, words.BE_PAST)).form(plural), subject)
    draft.add("as", _quality(dice, theme), "as")
    _thing(draft, dice, scene, theme, plural=dice.chance(0.5), plain=True, beside=noun)
    draft.stop()


def _general(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Owls and foxes live in the forest."""
    theme = scene.theme(dice)
    noun = scene.noun(dice, theme)
    subjects = [_noun(draft, theme, noun.plural)]
    if dice.chance(0.5):
        draft.add("and")
        subjects.append(_noun(draft, theme, scene.noun(dice, theme, beside=noun).plural))
    _predicate(draft, dice, scene, theme, tuple(subjects), plural=True)
    draft.stop()


def _question(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Where is the kettle? It is near the oven."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    be = dice.choose((words.BE, words.BE_PAST)).form(plural)
    verb = draft.add("where", be)
    noun, subject = _thing(draft, dice, scene, theme, plural=plural, plain=True)
    draft.relate("subject-verb", query=subject, key=verb)
    draft.stop("?")
    pronoun = draft.pronoun("they" if plural else "it", subject)
    _verb(draft, be, pronoun)
    if dice.chance(0.5):
        _whereabouts(draft, dice, theme)
    else:
        draft.add(dice.choose(words.NEARNESS))
        _thing(draft, dice, scene, theme, plural=dice.chance(0.5), beside=noun)
    draft.stop()


# --- people, and what they do


def _action(draft: Draft, dice: Dice, scene: Scene) -> None:
    """In the morning, the baker painted a small boat near the harbour."""
    _opening(draft, dice)
    if dice.chance(0.7):
        _mention(draft, dice, scene.person(dice))
    else:
        draft.add("the", dice.choose(words.ROLES).form(dice.chance(0.3)))
    _deed(draft, dice, scene)
    ending = dice.choose(("nothing", "place", "moment"))
    if ending == "place":
        _whereabouts(draft, dice, scene.theme(dice))
    elif ending == "moment":
        draft.add(dice.choose(words.MOMENTS))
    draft.stop()


def _habit(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Every morning Anna and Tom feed the hens."""
    draft.add(*dice.choose(words.HABITS))
    subjects, plural = _actors(draft, dice, scene)
    if dice.chance(0.7):
        theme = scene.theme(dice)
        verb = dice.choose(_verbs_for(dice, theme))
        _object(draft, dice, scene, theme, _verb(draft, verb.form(plural), *subjects))
    else:
        _verb(draft, dice.choose(words.LIVING).form(plural), *subjects)
        _whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _rest(draft: Draft, dice: Dice, scene: Scene) -> None:
    """After lunch, the players waited outside the stadium."""
    _opening(draft, dice)
    _actors(draft, dice, scene)
    draft.add(dice.choose(words.LIVING + words.RESTING).past)
    _whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _relative(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The teachers who found the map were tired."""
    draft.add(dice.choose(("the", "a")) if (singular := dice.chance(0.5)) else dice.choose(("the", "some", "two")))
    subject = draft.add(dice.choose(words.ROLES).form(not singular))
    draft.add("who")
    _deed(draft, dice, scene)
    verb = dice.choose((words.BE, words.BE_PAST)).form(not singular)
    _verb(draft, verb, subject)
    draft.add(dice.choose(words.FEELINGS))
    draft.stop()


def _reason(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna lost her book, so she went to the library."""
    antecedent, pronouns = _anyone(draft, dice, scene)
    theme = scene.theme(dice)
    verb = draft.add(dice.choose(words.LOSING).past)
    draft.pronoun(pronouns.possessive, antecedent)
    plural = dice.chance(0.4)
    _, thing = _described(draft, dice, scene, theme, plural=plural)
    draft.relate("verb-object", query=thing, key=verb)
    draft.comma()
    ending = dice.choose(("because", "so", "but"))
    draft.add(ending)
    subject = draft.pronoun(pronouns.subject, antecedent)
    if ending == "because":
        _verb(draft, "was", subject)
        draft.add(dice.choose(words.FEELINGS))
    elif ending == "so":
        draft.add(dice.choose(words.ARRIVING), "to")
        _place(draft, dice, theme)
    else:
        found = draft.add(dice.choose(words.ACTIONS).past)
        draft.relate("verb-object", query=draft.pronoun("them" if plural else "it", thing), key=found)
        draft.add(dice.choose(words.MOMENTS))
    draft.stop()


def _wish(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom wanted to paint the fence, but he was late."""
    antecedent, pronouns = _anyone(draft, dice, scene)
    draft.add(dice.choose(("wanted", "decided")), "to")
    theme = scene.theme(dice)
    _object(draft, dice, scene, theme, draft.add(dice.choose(_verbs_for(dice, theme)).plural))
    draft.comma()
    draft.add(dice.choose(("but", "because")))
    _verb(draft, "was", draft.pronoun(pronouns.subject, antecedent))
    draft.add(dice.choose(words.FEELINGS))
    draft.stop()


def _outing(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna walked to the market. She bought a basket there."""
    antecedent, pronouns = _anyone(draft, dice, scene)
    draft.add(dice.choose(words.ARRIVING), "to")
    _place(draft, dice, scene.theme(dice))
    draft.stop()
    draft.pronoun(pronouns.subject, antecedent)
    _deed(draft, dice, scene)
    draft.add("there")
    draft.stop()


def _mishap(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna blamed herself at the station."""
    antecedent, pronouns = _anyone(draft, dice, scene)
    draft.add(dice.choose(words.REFLEXIVE))
    draft.pronoun(pronouns.reflexive, antecedent)
    _whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _meeting(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna met Tom at the station, and she gave him a map."""
    first = scene.person(dice, gender=dice.choose(("female", "male")))
    antecedents = {first.gender: _mention(draft, dice, first, telling=True)}
    draft.add("met")
    second = scene.person(dice, gender="male" if first.gender == "female" else "female")
    antecedents[second.gender] = _mention(draft, dice, second, telling=True)
    _whereabouts(draft, dice, scene.theme(dice))
    draft.comma()
    draft.add("and")
    giver, receiver = dice.choose(((first, second), (second, first)))
    draft.pronoun(giver.pronouns.subject, antecedents[giver.gender])
    verb = draft.add(dice.choose(words.GIVING).past)
    draft.pronoun(receiver.pronouns.object, antecedents[receiver.gender])
    _object(draft, dice, scene, scene.theme(dice), verb)
    draft.stop()


def _recipient(draft: Draft, dice: Dice, scene: Scene) -> None:
    """When Anna and Tom went to the harbour, Anna gave a shell to Tom."""
    opening = dice.choose(("joined", "two sentences", "already there"), (2.0, 1.0, 1.0))
    if opening == "joined":
        draft.add(dice.choose(words.JOINING))
    elif opening == "two sentences":
        _opening(draft, dice)
    first = scene.person(dice)
    mentions = {first.name: draft.name(first.name)}
    draft.add("and")
    second = scene.person(dice, besides=first)
    mentions[second.name] = draft.name(second.name)
    if opening == "already there":
        draft.add("were")
        _whereabouts(draft, dice, scene.theme(dice))
    else:
        draft.add(dice.choose(words.ARRIVING), "to")
        _place(draft, dice, scene.theme(dice))
    if opening == "joined":
        draft.comma()
    else:
        draft.stop()
    giver, receiver = dice.choose(((first, second), (second, first)))
    draft.name(giver.name)
    if dice.chance(0.2):
        draft.add("decided", "to")
        verb = draft.add(dice.choose(words.GIVING).plural)
    else:
        verb = draft.add(dice.choose(words.GIVING).past)
    _object(draft, dice, scene, scene.theme(dice), verb)
    draft.relate("recipient", query=draft.add("to"), key=mentions[receiver.name])
    draft.name(receiver.name)
    draft.stop()


def _modal(draft: Draft, dice: Dice, scene: Scene) -> None:
    """We should visit the castle tomorrow."""
    draft.add(dice.choose(("I", "you", "we", "everyone")), dice.choose(words.MODALS))
    theme = scene.theme(dice)
    _object(draft, dice, scene, theme, draft.add(dice.choose(_verbs_for(dice, theme)).plural))
    if dice.chance(0.5):
        draft.add(dice.choose(words.SOON))
    draft.stop()


# --- what people say, sing and write


def _quotation(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Someone's words: "The boats near the island are new," said Anna."""
    quote = draft.open(words.QUOTE)
    _state(draft, dice, scene)
    draft.comma()
    draft.close(words.QUOTE, quote)
    draft.add("said")
    _mention(draft, dice, scene.person(dice))
    draft.stop()


def _thought(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom thinks that the boats near the island are new."""
    subjects, plural = _actors(draft, dice, scene)
    verb = dice.choose(words.THINKING)
    if dice.chance(0.3):
        draft.add(verb.past)
    else:
        _verb(draft, verb.form(plural), *subjects)
    draft.add("that")
    _state(draft, dice, scene)
    draft.stop()


def _song(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna sang of boats and stars and owls, of boats and stars and owls."""
    draft.name(scene.person(dice).name)
    draft.add("sang")
    start = draft.add("of")
    span = ["of", *_series(draft, dice, scene, "and")]
    draft.comma()
    for offset, word in enumerate(span):
        draft.relate("repeat", query=draft.add(word), key=start + offset)
    draft.stop()


def _copy(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna wrote: boats, stars, owls. Tom wrote: boats, stars, owls."""
    writer = scene.person(dice)
    draft.name(writer.name)
    start = draft.add("wrote", words.COLON) + 1
    span = _series(draft, dice, scene, words.COMMA)
    draft.stop()
    draft.name(scene.person(dice, besides=writer).name)
    draft.add("wrote", words.COLON)
    for offset, word in enumerate(span):
        draft.relate("repeat", query=draft.add(word), key=start + offset)
    draft.stop()


def _list(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom saw apples, pears and five plums in the garden."""
    _mention(draft, dice, scene.person(dice))
    theme = scene.theme(dice)
    verb = draft.add(dice.choose(_verbs_for(dice, theme)).past)
    for place in range(3):
        if place == 1:
            draft.comma()
        elif place == 2:
            draft.add("and")
        number = draft.add(dice.choose(words.NUMBERS)) if dice.chance(0.4) else None
        thing = _noun(draft, theme, scene.noun(dice, theme).plural)
        if number is not None:
            draft.relate("modifier", query=thing, key=number)
        draft.relate("verb-object", query=thing, key=verb)
    _whereabouts(draft, dice, theme)
    draft.stop()


SENTENCES: dict[str, Writer] = {
    "agreement": _agreement,
    "aside": _aside,
    "likeness": _likeness,
    "general": _general,
    "question": _question,
    "action": _action,
    "habit": _habit,
    "rest": _rest,
    "relative": _relative,
    "reason": _reason,
    "wish": _wish,
    "outing": _outing,
    "mishap": _mishap,
    "meeting": _meeting,
    "recipient": _recipient,
    "modal": _modal,
    "quotation": _quotation,
    "thought": _thought,
    "song": _song,
    "copy": _copy,
    "list": _list,
}
"""The kinds of sentences, each a function that writes one (or two that belong together) into a draft."""


# --- parts of sentences


def _opening(draft: Draft, dice: Dice) -> None:
    """Perhaps "In the morning,"."""
    if dice.chance(0.25):
        draft.add(*dice.choose(words.OPENINGS))
        draft.comma()


def _state(draft: Draft, dice: Dice, scene: Scene) -> None:
    """A thing, others near it, and a verb that agrees with the first: "the keys beside the cabinet are rusty"."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    noun, subject = _thing(draft, dice, scene, theme, plural=plural)
    for _ in range(dice.choose((0, 1, 2), (1.0, 2.0, 1.0))):
        draft.add(dice.choose(words.NEARNESS))
        _thing(draft, dice, scene, scene.theme(dice), plural=dice.chance(0.5), beside=noun)
    _predicate(draft, dice, scene, theme, (subject,), plural=plural)


def _inside(draft: Draft, dice: Dice, scene: Scene, theme: Theme) -> None:
    """What stands in a bracket: a short phrase without a verb that agrees."""
    choice = dice.choose(("maker", "past", "company", "origin"))
    if choice == "maker":
        draft.add("made", "by")
        draft.name(scene.person(dice).name)
    elif choice == "past":
        draft.add("once", dice.choose(words.ADJECTIVES), "and", dice.choose(theme.adjectives))
    elif choice == "company":
        draft.add("with")
        _thing(draft, dice, scene, theme, plural=dice.chance(0.5))
    else:
        draft.add("from")
        _place(draft, dice, theme)


def _predicate(
    draft: Draft, dice: Dice, scene: Scene, theme: Theme, subjects: tuple[int, ...], *, plural: bool
) -> None:
    """The verb that agrees with the subject, and what follows it."""
    if dice.chance(0.6):
        _verb(draft, dice.choose(words.LINKING).form(plural), *subjects)
        if dice.chance(0.15):
            draft.add(dice.choose(words.DEGREES))
        draft.add(_quality(dice, theme))
    else:
        _verb(draft, dice.choose(words.RESTING).form(plural), *subjects)
        _whereabouts(draft, dice, theme)


def _verb(draft: Draft, verb: str, *subjects: int) -> int:
    """A verb, related to the nouns of its subject."""
    index = draft.add(verb)
    for subject in subjects:
        draft.relate("subject-verb", query=index, key=subject)
    return index


def _mention(draft: Draft, dice: Dice, person: Person, *, telling: bool = False) -> int:
    """A person's name, perhaps with a title; always with one if the gender must be known (`telling`) and is not."""
    if person.tells:
        titled = dice.chance(0.1)
    else:
        titled = telling
    if titled:
        draft.add(person.addressed(dice))
    return draft.name(person.name)


def _anyone(draft: Draft, dice: Dice, scene: Scene) -> tuple[int, words.Pronouns]:
    """A person by name, or "the girl"; with the pronouns that will stand for them."""
    if dice.chance(0.75):
        person = scene.person(dice)
        return _mention(draft, dice, person, telling=True), person.pronouns
    gender = dice.choose(("female", "male"))
    return draft.add("the", dice.choose(words.GENDERED[gender])), words.PRONOUNS[gender]


def _actors(draft: Draft, dice: Dice, scene: Scene) -> tuple[tuple[int, ...], bool]:
    """Those who do something: one or two people by name, or by what they are; and whether they are plural."""
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


def _deed(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Something done in the past: "painted a small boat"."""
    theme = scene.theme(dice)
    _object(draft, dice, scene, theme, draft.add(dice.choose(_verbs_for(dice, theme)).past))


def _verbs_for(dice: Dice, theme: Theme) -> tuple[Verb, ...]:
    """Verbs that any thing can be the object of, or those of the theme."""
    return dice.choose((words.ACTIONS, theme.verbs))


def _object(draft: Draft, dice: Dice, scene: Scene, theme: Theme, verb: int) -> None:
    """A thing that something is done to, related to its verb."""
    _, thing = _thing(draft, dice, scene, theme, plural=dice.chance(0.4))
    draft.relate("verb-object", query=thing, key=verb)


def _thing(
    draft: Draft,
    dice: Dice,
    scene: Scene,
    theme: Theme,
    *,
    plural: bool,
    plain: bool = False,
    beside: Noun | None = None,
) -> tuple[Noun, int]:
    """An article or number, perhaps an adjective, and a noun of the theme; returns the noun and its index.

    A plain thing has "the" and no adjective. `beside` is the subject if this noun stands between it and its verb.
    """
    determiner = "the" if plain else dice.choose(*(PLURAL if plural else SINGULAR))
    if determiner == "number":
        determiner = dice.choose(words.NUMBERS)
    count = draft.add(determiner)
    noun, index = _described(draft, dice, scene, theme, plural=plural, plain=plain, beside=beside)
    if determiner in words.NUMBERS:
        draft.relate("modifier", query=index, key=count)
    return noun, index


SINGULAR = (words.SINGULAR_DETERMINERS, (10.0, 5.0, *(0.5,) * (len(words.SINGULAR_DETERMINERS) - 2)))
PLURAL = (("number", *words.PLURAL_DETERMINERS), (2.0, 10.0, *(0.5,) * (len(words.PLURAL_DETERMINERS) - 1)))


def _described(
    draft: Draft,
    dice: Dice,
    scene: Scene,
    theme: Theme,
    *,
    plural: bool,
    plain: bool = False,
    beside: Noun | None = None,
) -> tuple[Noun, int]:
    """Perhaps an adjective, and a noun of the theme; returns the noun and its index."""
    modifier = None if plain or dice.chance(0.7) else draft.add(_quality(dice, theme))
    noun = scene.noun(dice, theme, beside=beside)
    index = _noun(draft, theme, noun.form(plural))
    if modifier is not None:
        draft.relate("modifier", query=index, key=modifier)
    return noun, index


def _noun(draft: Draft, theme: Theme, noun: str) -> int:
    """Write a noun, related to the last of its theme."""
    return draft.add_again(noun, theme.name, "same-theme")


def _series(draft: Draft, dice: Dice, scene: Scene, between: str) -> list[str]:
    """Write two to four plural nouns with a word or comma between them; returns what was written."""
    written: list[str] = []
    for place in range(dice.choose((2, 3, 4))):
        if place:
            written.append(between)
            draft.add(between)
        theme = scene.theme(dice)
        written.append(scene.noun(dice, theme).plural)
        _noun(draft, theme, written[-1])
    return written


def _whereabouts(draft: Draft, dice: Dice, theme: Theme) -> None:
    """At or near a place of the theme."""
    draft.add(dice.choose(words.SPOTS))
    _place(draft, dice, theme)


def _place(draft: Draft, dice: Dice, theme: Theme) -> None:
    """The place of a theme."""
    draft.add("the")
    draft.add_again(dice.choose(theme.places), theme.name, "same-theme")


def _quality(dice: Dice, theme: Theme) -> str:
    """An adjective that fits a thing of the theme."""
    return dice.choose(dice.choose((words.ADJECTIVES, theme.adjectives)))
