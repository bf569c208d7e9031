"""Relations of the grammar connect the words that they name, and each text has one right answer."""

from random import Random
from typing import get_args

from hypothesis import example, given
from hypothesis import strategies as st
from language import words
from language.grammar import HELD_OUT, TRAINING, Document, Kind, Relation, Side, document

NAMES = {" " + name for name in words.names()}
ROLES = {" " + form for noun in words.ROLES for form in (noun.singular, noun.plural)}
NOUNS = {" " + form for noun in words.things() for form in (noun.singular, noun.plural)}
PLURALS = {" " + noun.plural for noun in words.things() + words.ROLES}
PLACES = {" " + place for theme in words.THEMES for place in theme.places}
ADJECTIVES = {" " + word for word in words.ADJECTIVES} | {" " + a for t in words.THEMES for a in t.adjectives}
NUMBERS = {" " + word for word in words.NUMBERS}
PEOPLE = {
    gender: {" " + word for word in words.GENDERED[gender] + names}
    for gender, names in (("female", words.FEMALE + words.UNSEEN[:12]), ("male", words.MALE + words.UNSEEN[12:]))
}
TITLES = {gender: {" " + title for title in titles} for gender, titles in words.TITLES.items()}
PRONOUNS = {gender: {" " + word for word in vars(pronouns).values()} for gender, pronouns in words.PRONOUNS.items()}
AGREEING = (*words.LINKING, *words.RESTING, *words.LIVING, *words.THINKING, *words.transitive())

seeds = st.integers(min_value=0, max_value=2**32)


def pairs(text: Document, kind: str) -> list[tuple[Relation, str, str]]:
    """The relations of a kind, with the words at query and key in the form they have within a sentence."""
    return [(r, inner(text, r.query), inner(text, r.key)) for r in text.relations if r.relation == kind]


def inner(text: Document, index: int) -> str:
    """A word of a document in the form it has within a sentence: with a space, and without a sentence's capital."""
    word = " " + text.words[index].lstrip()
    names = NAMES | {title for titles in TITLES.values() for title in titles}
    return word if word in names else word.lower()


def sentence_before(text: Document, index: int) -> list[str]:
    """The words of a sentence up to an index."""
    ends = [place for place in range(index) if text.words[place] in words.FINAL]
    return [inner(text, place) for place in range(ends[-1] + 1 if ends else 0, index)]


@given(seeds)
def test_words_are_vocabulary_and_join_to_english_spacing(seed: int) -> None:
    text = document(Random(seed))
    assert set(text.words) <= set(words.vocabulary())
    assert text.text == text.text.strip()
    assert text.text.lstrip('"')[0].isupper()
    assert not any(
        mistake in text.text
        for mistake in ("  ", " ,", " .", "( ", "[ ", " )", " ]", ",.", ".(", " a a", " a e", " a i", " a o")
    )
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
    joined = [r.query for r, _, _ in pairs(text, "subject-verb")]
    for relation, later, earlier in pairs(text, "subject-verb"):
        asked = " where" in sentence_before(text, relation.query)
        verb, subject = (earlier, later) if asked else (later, earlier)
        many = subject in PLURALS | {" they"} or joined.count(relation.query) == 2
        assert verb in {" " + (form.plural if many else form.singular) for form in AGREEING}
        assert subject in NOUNS | ROLES | NAMES | {" it", " they", " he", " she"}


@given(seeds)
def test_objects_follow_their_verbs(seed: int) -> None:
    text = document(Random(seed))
    verbs = {" " + form for verb in words.transitive() for form in (verb.plural, verb.singular, verb.past)}
    for _, thing, verb in pairs(text, "verb-object"):
        assert thing in NOUNS | {" it", " them"}
        assert verb in verbs


@given(seeds)
def test_modifiers_are_adjectives_beside_their_nouns(seed: int) -> None:
    text = document(Random(seed))
    for relation, noun, adjective in pairs(text, "modifier"):
        assert noun in NOUNS
        assert adjective in ADJECTIVES | NUMBERS
        between = {inner(text, place) for place in range(relation.key + 1, relation.query)}
        assert between <= ADJECTIVES
        assert not between or adjective in NUMBERS


@example(seed=900, side=TRAINING)  # "Mrs Morgan met Sir Tom, and she sent him seven beds": titles tell who is meant
@given(seeds, st.sampled_from([TRAINING, HELD_OUT]))
def test_pronouns_have_one_antecedent(seed: int, side: Side) -> None:
    text = document(Random(seed), side=side)
    for relation, pronoun, meant in pairs(text, "pronoun-antecedent"):
        if pronoun in (" it", " they", " them"):
            assert meant in (NOUNS & PLURALS if pronoun != " it" else NOUNS - PLURALS)
            continue
        gender = next(gender for gender, forms in PRONOUNS.items() if pronoun in forms)
        other = "male" if gender == "female" else "female"
        title = inner(text, relation.key - 1) if relation.key else ""
        assert meant not in PEOPLE[other]
        assert title not in TITLES[other]
        assert (meant in PEOPLE[gender] and (side is TRAINING or meant not in NAMES)) or title in TITLES[gender]
        # Nobody else whom a pronoun could mean is named between it and its antecedent, or before it in its sentence.
        start = relation.key - len(sentence_before(text, relation.key))
        for place in {*range(start, relation.query)} - {relation.key}:
            if inner(text, place) in NAMES:
                title = inner(text, place - 1) if place else ""
                assert inner(text, place) in PEOPLE[other] or title in TITLES[other]


@given(seeds, st.sampled_from([TRAINING, HELD_OUT]))
def test_recipient_is_the_one_of_two_who_does_not_give(seed: int, side: Side) -> None:
    text = document(Random(seed), side=side)
    for relation, preposition, name in pairs(text, "recipient"):
        assert preposition == " to"
        assert inner(text, relation.query + 1) == name
        giver = next(
            place for place in range(relation.key, relation.query) if text.words[place] in (words.COMMA, *words.FINAL)
        )
        assert inner(text, giver + 1) in NAMES - {name}
        pair = {inner(text, relation.key - 2), inner(text, relation.key + 2)}
        assert inner(text, giver + 1) in pair
        assert text.words[relation.query + 2] in words.FINAL


@given(seeds, seeds)
def test_sides_share_no_names_and_no_pairs(seed: int, other: int) -> None:
    learnt, held = document(Random(seed), side=TRAINING), document(Random(other), side=HELD_OUT)
    assert (
        not NAMES
        & {inner(learnt, i) for i in range(len(learnt.words))}
        & {inner(held, i) for i in range(len(held.words))}
    )
    assert not attractors(learnt) & attractors(held)


def attractors(text: Document) -> set[tuple[str, str]]:
    """Subjects with the nouns between them and their verbs, outside brackets, in the singular."""
    singular = {" " + form: noun.singular for noun in words.things() for form in (noun.singular, noun.plural)}
    found = set()
    for relation, _, subject in pairs(text, "subject-verb"):
        between = [inner(text, place) for place in range(relation.key + 1, relation.query)]
        if subject in singular and not any(" " + mark in between for mark in words.BRACKETS):
            found |= {(singular[subject], singular[word]) for word in between if word in singular}
    return found


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
        if index in closes:
            assert closes[index] == open_.pop()
            opened = text.words[closes[index]].strip()
            assert word == words.BRACKETS.get(opened, words.QUOTE)
        elif word.strip() in words.BRACKETS or word.strip() == words.QUOTE:
            open_.append(index)
        else:
            assert word not in words.BRACKETS.values()
    assert not open_


@given(seeds)
def test_delimiters_are_chained(seed: int) -> None:
    text = document(Random(seed))
    stops = [index for index, word in enumerate(text.words) if word in words.FINAL]
    found = {(relation.query, relation.key) for relation, _, _ in pairs(text, "sentence-final")}
    assert found == set(zip(stops[1:], stops[:-1], strict=True))
    for relation, _, comma in pairs(text, "comma"):
        assert relation.query in stops
        assert comma.strip() == words.COMMA
        assert not {words.COMMA, *words.FINAL} & set(text.words[relation.key + 1 : relation.query])


@given(seeds, st.sampled_from(["song", "copy"]))
def test_a_repeated_span_is_said_twice_word_for_word(seed: int, kind: str) -> None:
    text = document(Random(seed), sentences=1, kinds=[kind])
    repeats = [relation for relation, _, _ in pairs(text, "repeat")]
    assert len({relation.query - relation.key for relation in repeats}) == 1
    assert [relation.query for relation in repeats] == list(range(repeats[0].query, len(text.words) - 1))
    assert all(text.words[relation.query] == text.words[relation.key] for relation in repeats)


def test_every_relation_occurs() -> None:
    found = {relation.relation for seed in range(20) for relation in document(Random(seed)).relations}
    assert found == set(get_args(Kind))


def test_subjects_meet_up_to_two_attractors() -> None:
    between = set()
    for seed in range(200):
        text = document(Random(seed), sentences=2, kinds=["agreement"])
        for relation, _, _ in pairs(text, "subject-verb"):
            between.add(sum(inner(text, i) in NOUNS for i in range(relation.key + 1, relation.query)))
    assert between == {0, 1, 2}


def test_words_have_one_reading() -> None:
    """Every word has only one part of speech."""
    verbs = [{" " + form for form in vars(verb).values()} for verb in {*AGREEING} - {words.BE, words.BE_PAST}]
    feelings = {" " + word for word in words.FEELINGS}
    sets = [NOUNS, ROLES, PLACES, ADJECTIVES, feelings, NUMBERS, NAMES, *PEOPLE.values(), *TITLES.values(), *verbs]
    sets[-len(verbs) - 4 : -len(verbs) - 2] = [people - NAMES for people in PEOPLE.values()]
    assert sum(map(len, sets)) == len(set.union(*sets))
    assert len(NOUNS) == 2 * len(words.things()) == 2 * 20 * len(words.THEMES)
    assert len({theme.name for theme in words.THEMES}) == len(words.THEMES)
