"""The grammar keeps its word: relations point at what they name, and each text has one right answer."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmech.demo import words
from attnmech.demo.grammar import SENTENCES, Document, Relation, document

NAMES = {" " + name for name in words.GIRLS + words.BOYS}
NOUNS = {" " + form for theme in words.THEMES for noun in theme.nouns for form in (noun.singular, noun.plural)}
PLURALS = {" " + noun.plural for theme in words.THEMES for noun in theme.nouns}
PLACES = {" " + place for theme in words.THEMES for place in theme.places}
ADJECTIVES = {" " + word for word in words.ADJECTIVES} | {" " + a for t in words.THEMES for a in t.adjectives}
PRONOUNS = {gender: {f" {word}" for word in pronouns} for gender, pronouns in words.PRONOUNS.items()}

seeds = st.integers(min_value=0, max_value=2**32)


def pairs(text: Document, kind: str) -> list[tuple[Relation, str, str]]:
    """The relations of a kind, with the words at query and key as they stand within a sentence."""
    spaced = [" " + word.lstrip() for word in text.words]
    return [(r, spaced[r.query], spaced[r.key]) for r in text.relations if r.relation == kind]


def test_same_seed_same_text_other_seed_other_text() -> None:
    assert document(Random(3)) == document(Random(3))
    assert document(Random(3)).text != document(Random(4)).text


@given(seeds)
def test_words_are_vocabulary_and_join_to_english_spacing(seed: int) -> None:
    text = document(Random(seed))
    assert set(text.words) <= set(words.vocabulary())
    assert text.text == text.text.strip()
    assert text.text[0].isupper()
    assert not any(mistake in text.text for mistake in ("  ", " ,", " .", "( ", "[ ", " )", " ]", ",.", ".("))
    assert text.text.endswith(".")


@given(seeds)
def test_keys_stand_before_queries_inside_the_text(seed: int) -> None:
    text = document(Random(seed))
    assert text.relations
    assert len(set(text.relations)) == len(text.relations)
    for relation in text.relations:
        assert 0 <= relation.key < relation.query < len(text.words)


@given(seeds)
def test_verbs_agree_with_their_subjects(seed: int) -> None:
    text = document(Random(seed))
    for _, verb, subject in pairs(text, "subject-verb"):
        forms = {" " + (v.plural if subject in PLURALS else v.singular) for v in words.AGREEING}
        assert subject in NOUNS
        assert verb in forms


@given(seeds)
def test_objects_follow_their_verbs(seed: int) -> None:
    text = document(Random(seed))
    verbs = {" " + verb for verb in words.ACTIONS + words.LOSING + words.GIVING}
    for _, thing, verb in pairs(text, "verb-object"):
        assert thing in NOUNS
        assert verb in verbs


@given(seeds)
def test_modifiers_are_adjectives_beside_their_nouns(seed: int) -> None:
    text = document(Random(seed))
    for relation, noun, adjective in pairs(text, "modifier"):
        assert noun in NOUNS
        assert adjective in ADJECTIVES
        assert relation.query == relation.key + 1


@given(seeds)
def test_pronouns_have_the_only_name_of_their_sentence_as_antecedent(seed: int) -> None:
    text = document(Random(seed))
    for relation, pronoun, name in pairs(text, "pronoun-antecedent"):
        gender = "girl" if name.strip() in words.GIRLS else "boy"
        assert pronoun in PRONOUNS[gender]
        between = text.words[relation.key + 1 : relation.query]
        assert not NAMES & set(between)
        assert words.STOP not in between


@given(seeds)
def test_recipient_is_the_one_of_two_who_does_not_give(seed: int) -> None:
    text = document(Random(seed))
    for relation, preposition, name in pairs(text, "recipient"):
        assert preposition == " to"
        assert text.words[relation.query + 1] == name
        giver = text.words.index(words.COMMA, relation.key) + 1
        assert text.words[giver] in NAMES - {name}


@given(seeds)
def test_same_name_points_at_the_latest_mention(seed: int) -> None:
    text = document(Random(seed))
    for relation, name, earlier in pairs(text, "same-name"):
        assert name == earlier
        assert name in NAMES
        assert name not in text.words[relation.key + 1 : relation.query]


@given(seeds)
def test_same_theme_joins_things_and_places_of_one_theme(seed: int) -> None:
    text = document(Random(seed))
    theme_of = {
        " " + form: theme.name
        for theme in words.THEMES
        for form in (*theme.places, *(f for noun in theme.nouns for f in (noun.singular, noun.plural)))
    }
    for _, later, earlier in pairs(text, "same-theme"):
        assert theme_of[later] == theme_of[earlier]


@given(seeds)
def test_brackets_close_what_is_open(seed: int) -> None:
    text = document(Random(seed))
    closes = {relation.query: relation.key for relation, _, _ in pairs(text, "bracket")}
    open_: list[int] = []
    for index, word in enumerate(text.words):
        if word.strip() in words.BRACKETS:
            open_.append(index)
        elif word in words.BRACKETS.values():
            assert closes[index] == open_.pop()
            assert words.BRACKETS[text.words[closes[index]].strip()] == word
    assert not open_


@given(seeds)
def test_delimiters_are_chained(seed: int) -> None:
    text = document(Random(seed))
    stops = [index for index, word in enumerate(text.words) if word == words.STOP]
    found = {(relation.query, relation.key) for relation, _, _ in pairs(text, "sentence-final")}
    assert found == set(zip(stops[1:], stops[:-1], strict=True))
    for relation, stop, comma in pairs(text, "comma"):
        assert (stop.strip(), comma.strip()) == (words.STOP, words.COMMA)
        assert not {words.STOP, words.COMMA} & set(text.words[relation.key + 1 : relation.query])


@given(seeds)
def test_repeats_keep_one_distance_within_a_sentence(seed: int) -> None:
    text = document(Random(seed))
    repeats = pairs(text, "repeat")
    assert repeats
    for relation, word, copy in repeats:
        assert word == copy
        assert words.STOP not in text.words[relation.key : relation.query]
    assert len({relation.query - relation.key for relation, _, _ in repeats}) == 1


@pytest.mark.parametrize("kind", SENTENCES)
def test_every_kind_stands_alone(kind: str) -> None:
    text = document(Random(0), sentences=3, kinds=[kind])
    assert text.words.count(words.STOP) == 3


def test_every_relation_occurs_in_every_round_of_kinds() -> None:
    found = {relation.relation for seed in range(20) for relation in document(Random(seed)).relations}
    assert len(found) == 11


def test_subjects_meet_up_to_two_attractors() -> None:
    between = set()
    for seed in range(200):
        text = document(Random(seed), sentences=2, kinds=["agreement"])
        for relation, _, _ in pairs(text, "subject-verb"):
            between.add(sum(word in NOUNS for word in text.words[relation.key + 1 : relation.query]))
    assert between == {0, 1, 2}


def test_words_have_one_reading() -> None:
    assert not NOUNS & PLACES
    assert len(PLURALS) * 2 == len(NOUNS)
    assert not NOUNS & ADJECTIVES
