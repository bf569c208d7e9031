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
from .phrases import (
    add_actors,
    add_bracketed,
    add_deed,
    add_described,
    add_mention,
    add_noun,
    add_object,
    add_opening,
    add_person,
    add_place,
    add_predicate,
    add_series,
    add_state,
    add_thing,
    add_verb,
    add_whereabouts,
    quality,
    verbs_for,
)
from .scene import HELD_OUT, TRAINING, Scene, Side

__all__ = ["HELD_OUT", "SENTENCES", "TRAINING", "Document", "Kind", "Relation", "Side", "document", "tell"]

Writer = Callable[[Draft, Dice, Scene], None]


def document(rng: Random, *, sentences: int = 8, kinds: Sequence[str] | None = None, side: Side = TRAINING) -> Document:
    """Writes a text of several sentences about a few people and themes.

    >>> document(Random(7), sentences=1, kinds=["recipient"]).text
    'As Clara and Frank ran to the bakery, Clara gave the pan to Frank.'

    `kinds` names the entries of `SENTENCES` to draw from, by default all; an entry may write two sentences. `side`
    chooses training texts, or texts with held-out names and pairs of nouns.
    """
    return tell(Draft(), Dice(rng), sentences=sentences, kinds=kinds, side=side)


def tell(
    draft: Draft, dice: Dice, *, sentences: int = 8, kinds: Sequence[str] | None = None, side: Side = TRAINING
) -> Document:
    """Returns the document that these choices produce, written into an empty draft."""
    writers = [SENTENCES[kind] for kind in (kinds or SENTENCES)]
    scene = Scene(side)
    for _ in range(sentences):
        dice.choose(writers)(draft, dice, scene)
    return draft.finish(dice.surprisal)


# --- things, and what is said about them


def _agreement(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The keys beside the old cabinet are rusty."""
    add_opening(draft, dice)
    add_state(draft, dice, scene)
    draft.stop()


def _aside(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The keys (made by Anna [once small and heavy]) are rusty."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    _, subject = add_thing(draft, dice, scene, theme, plural=plural)
    outer = dice.choose(tuple(words.BRACKETS))
    bracket = draft.open(outer)
    add_bracketed(draft, dice, scene, theme)
    if dice.chance(0.3):
        inner = next(mark for mark in words.BRACKETS if mark != outer)
        nested = draft.open(inner)
        add_bracketed(draft, dice, scene, theme)
        draft.close(inner, nested)
    draft.close(outer, bracket)
    add_predicate(draft, dice, scene, theme, (subject,), plural=plural)
    draft.stop()


def _likeness(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The violins were as old as the drum."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    noun, subject = add_thing(draft, dice, scene, theme, plural=plural, plain=True)
    add_verb(draft, dice.choose((words.BE, words.BE_PAST)).form(plural), subject)
    draft.add("as", quality(dice, theme), "as")
    add_thing(draft, dice, scene, theme, plural=dice.chance(0.5), plain=True, beside=noun)
    draft.stop()


def _general(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Owls and foxes live in the forest."""
    theme = scene.theme(dice)
    noun = scene.noun(dice, theme)
    subjects = [add_noun(draft, theme, noun.plural)]
    if dice.chance(0.5):
        draft.add("and")
        subjects.append(add_noun(draft, theme, scene.noun(dice, theme, beside=noun).plural))
    add_predicate(draft, dice, scene, theme, tuple(subjects), plural=True)
    draft.stop()


def _question(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Question: Where is the kettle? It is near the oven."""
    theme = scene.theme(dice)
    plural = dice.chance(0.5)
    be = dice.choose((words.BE, words.BE_PAST)).form(plural)
    verb = draft.add("where", be)
    noun, subject = add_thing(draft, dice, scene, theme, plural=plural, plain=True)
    draft.relate("subject-verb", query=subject, key=verb)
    draft.stop("?")
    pronoun = draft.pronoun("they" if plural else "it", subject)
    add_verb(draft, be, pronoun)
    if dice.chance(0.5):
        add_whereabouts(draft, dice, theme)
    else:
        draft.add(dice.choose(words.NEARNESS))
        add_thing(draft, dice, scene, theme, plural=dice.chance(0.5), beside=noun)
    draft.stop()


# --- people, and what they do


def _action(draft: Draft, dice: Dice, scene: Scene) -> None:
    """In the morning, the baker painted a small boat near the harbour."""
    add_opening(draft, dice)
    if dice.chance(0.7):
        add_mention(draft, dice, scene.person(dice))
    else:
        draft.add("the", dice.choose(words.ROLES).form(dice.chance(0.3)))
    add_deed(draft, dice, scene)
    ending = dice.choose(("nothing", "place", "moment"))
    if ending == "place":
        add_whereabouts(draft, dice, scene.theme(dice))
    elif ending == "moment":
        draft.add(dice.choose(words.MOMENTS))
    draft.stop()


def _habit(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Every morning Anna and Tom feed the hens."""
    draft.add(*dice.choose(words.HABITS))
    subjects, plural = add_actors(draft, dice, scene)
    if dice.chance(0.7):
        theme = scene.theme(dice)
        verb = dice.choose(verbs_for(dice, theme))
        add_object(draft, dice, scene, theme, add_verb(draft, verb.form(plural), *subjects))
    else:
        add_verb(draft, dice.choose(words.LIVING).form(plural), *subjects)
        add_whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _rest(draft: Draft, dice: Dice, scene: Scene) -> None:
    """After lunch, the players waited outside the stadium."""
    add_opening(draft, dice)
    add_actors(draft, dice, scene)
    draft.add(dice.choose(words.LIVING + words.RESTING).past)
    add_whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _relative(draft: Draft, dice: Dice, scene: Scene) -> None:
    """The teachers who found the map were tired."""
    draft.add(dice.choose(("the", "a")) if (singular := dice.chance(0.5)) else dice.choose(("the", "some", "two")))
    subject = draft.add(dice.choose(words.ROLES).form(not singular))
    draft.add("who")
    add_deed(draft, dice, scene)
    verb = dice.choose((words.BE, words.BE_PAST)).form(not singular)
    add_verb(draft, verb, subject)
    draft.add(dice.choose(words.FEELINGS))
    draft.stop()


def _reason(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna lost her book, so she went to the library."""
    antecedent, pronouns = add_person(draft, dice, scene)
    theme = scene.theme(dice)
    verb = draft.add(dice.choose(words.LOSING).past)
    draft.pronoun(pronouns.possessive, antecedent)
    plural = dice.chance(0.4)
    _, thing = add_described(draft, dice, scene, theme, plural=plural)
    draft.relate("verb-object", query=thing, key=verb)
    draft.comma()
    ending = dice.choose(("because", "so", "but"))
    draft.add(ending)
    subject = draft.pronoun(pronouns.subject, antecedent)
    if ending == "because":
        add_verb(draft, "was", subject)
        draft.add(dice.choose(words.FEELINGS))
    elif ending == "so":
        draft.add(dice.choose(words.ARRIVING), "to")
        add_place(draft, dice, theme)
    else:
        verb = draft.add(dice.choose(words.ACTIONS).past)
        draft.relate("verb-object", query=draft.pronoun("them" if plural else "it", thing), key=verb)
        draft.add(dice.choose(words.MOMENTS))
    draft.stop()


def _wish(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom wanted to paint the fence, but he was late."""
    antecedent, pronouns = add_person(draft, dice, scene)
    draft.add(dice.choose(("wanted", "decided")), "to")
    theme = scene.theme(dice)
    add_object(draft, dice, scene, theme, draft.add(dice.choose(verbs_for(dice, theme)).plural))
    draft.comma()
    draft.add(dice.choose(("but", "because")))
    add_verb(draft, "was", draft.pronoun(pronouns.subject, antecedent))
    draft.add(dice.choose(words.FEELINGS))
    draft.stop()


def _outing(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna walked to the market. She bought a basket there."""
    antecedent, pronouns = add_person(draft, dice, scene)
    draft.add(dice.choose(words.ARRIVING), "to")
    add_place(draft, dice, scene.theme(dice))
    draft.stop()
    draft.pronoun(pronouns.subject, antecedent)
    add_deed(draft, dice, scene)
    draft.add("there")
    draft.stop()


def _mishap(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna blamed herself at the station."""
    antecedent, pronouns = add_person(draft, dice, scene)
    draft.add(dice.choose(words.REFLEXIVE))
    draft.pronoun(pronouns.reflexive, antecedent)
    add_whereabouts(draft, dice, scene.theme(dice))
    draft.stop()


def _meeting(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna met Tom at the station, and she gave him a map."""
    first = scene.person(dice, gender=dice.choose(("female", "male")))
    antecedents = {first.gender: add_mention(draft, dice, first, telling=True)}
    draft.add("met")
    second = scene.person(dice, gender="male" if first.gender == "female" else "female")
    antecedents[second.gender] = add_mention(draft, dice, second, telling=True)
    add_whereabouts(draft, dice, scene.theme(dice))
    draft.comma()
    draft.add("and")
    giver, receiver = dice.choose(((first, second), (second, first)))
    draft.pronoun(giver.pronouns.subject, antecedents[giver.gender])
    verb = draft.add(dice.choose(words.GIVING).past)
    draft.pronoun(receiver.pronouns.object, antecedents[receiver.gender])
    add_object(draft, dice, scene, scene.theme(dice), verb)
    draft.stop()


def _recipient(draft: Draft, dice: Dice, scene: Scene) -> None:
    """When Anna and Tom went to the harbour, Anna gave a shell to Tom."""
    opening = dice.choose(("joined", "two sentences", "already there"), (2.0, 1.0, 1.0))
    if opening == "joined":
        draft.add(dice.choose(words.JOINING))
    elif opening == "two sentences":
        add_opening(draft, dice)
    first = scene.person(dice)
    mentions = {first.name: draft.name(first.name)}
    draft.add("and")
    second = scene.person(dice, besides=first)
    mentions[second.name] = draft.name(second.name)
    if opening == "already there":
        draft.add("were")
        add_whereabouts(draft, dice, scene.theme(dice))
    else:
        draft.add(dice.choose(words.ARRIVING), "to")
        add_place(draft, dice, scene.theme(dice))
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
    add_object(draft, dice, scene, scene.theme(dice), verb)
    draft.relate("recipient", query=draft.add("to"), key=mentions[receiver.name])
    draft.name(receiver.name)
    draft.stop()


def _modal(draft: Draft, dice: Dice, scene: Scene) -> None:
    """We should visit the castle tomorrow."""
    draft.add(dice.choose(("I", "you", "we", "everyone")), dice.choose(words.MODALS))
    theme = scene.theme(dice)
    add_object(draft, dice, scene, theme, draft.add(dice.choose(verbs_for(dice, theme)).plural))
    if dice.chance(0.5):
        draft.add(dice.choose(words.SOON))
    draft.stop()


# --- what people say, sing and write


def _quotation(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Someone's words: "The boats near the island are new," said Anna."""
    quote = draft.open(words.QUOTE)
    add_state(draft, dice, scene)
    draft.comma()
    draft.close(words.QUOTE, quote)
    draft.add("said")
    add_mention(draft, dice, scene.person(dice))
    draft.stop()


def _thought(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom thinks that the boats near the island are new."""
    subjects, plural = add_actors(draft, dice, scene)
    verb = dice.choose(words.THINKING)
    if dice.chance(0.3):
        draft.add(verb.past)
    else:
        add_verb(draft, verb.form(plural), *subjects)
    draft.add("that")
    add_state(draft, dice, scene)
    draft.stop()


def _song(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna sang of boats and stars and owls, of boats and stars and owls."""
    draft.name(scene.person(dice).name)
    draft.add("sang")
    start = draft.add("of")
    span = ["of", *add_series(draft, dice, scene, "and")]
    draft.comma()
    for offset, word in enumerate(span):
        draft.relate("repeat", query=draft.add(word), key=start + offset)
    draft.stop()


def _copy(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Anna wrote: boats, stars, owls. Tom wrote: boats, stars, owls."""
    writer = scene.person(dice)
    draft.name(writer.name)
    start = draft.add("wrote", words.COLON) + 1
    span = add_series(draft, dice, scene, words.COMMA)
    draft.stop()
    draft.name(scene.person(dice, besides=writer).name)
    draft.add("wrote", words.COLON)
    for offset, word in enumerate(span):
        draft.relate("repeat", query=draft.add(word), key=start + offset)
    draft.stop()


def _list(draft: Draft, dice: Dice, scene: Scene) -> None:
    """Tom saw apples, pears and five plums in the garden."""
    add_mention(draft, dice, scene.person(dice))
    theme = scene.theme(dice)
    verb = draft.add(dice.choose(verbs_for(dice, theme)).past)
    for place in range(3):
        if place == 1:
            draft.comma()
        elif place == 2:
            draft.add("and")
        number = draft.add(dice.choose(words.NUMBERS)) if dice.chance(0.4) else None
        thing = add_noun(draft, theme, scene.noun(dice, theme).plural)
        if number is not None:
            draft.relate("modifier", query=thing, key=number)
        draft.relate("verb-object", query=thing, key=verb)
    add_whereabouts(draft, dice, theme)
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
