"""Heads that find labelled words: accuracies against loops, planted heads, and invalid labels."""

from contextlib import nullcontext
from itertools import groupby
from random import Random
from typing import Any

import models
import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents, labelled
from attnmech.errors import InputError
from attnmech.runs.words import words_of

TEXTS = ["Anna sang of shells.", "Tom gave an old anchor to Clara.", "The keys to the cabinet are here.",
         "He lost it, and left.", "She walked to the beach.", "Anna and Tom met."]  # fmt: skip


def mass_of(found: am.results.Relations, name: str, layer: int, head: int) -> float:
    return float(found.to_frame().set_index(["relation", "layer", "head"]).mass[name, layer, head])


def by_tokens(model: am.HookedModel, count: int = 3) -> list[tuple[str, int, int, str]]:
    """Random labels of tokens, of two relations."""
    rng, found = Random(0), []
    for text in TEXTS:
        length = model.encode(text).ids.shape[1]
        for _ in range(count):
            key = rng.randrange(1, length - 1)
            found.append((text, rng.randrange(key + 1, length), key, rng.choice(["one", "other"])))
    return found


@pytest.mark.core
def test_accuracies_are_those_of_a_loop() -> None:
    model = models.demo()
    labels = by_tokens(model)
    found = am.relations(model, labels)
    for name in ("one", "other"):
        chosen = [label for label in labels if label[3] == name]
        offsets = [query - key for _, query, key, _ in chosen]
        best = max(offsets.count(offset) for offset in offsets)
        assert found.baselines[name] == pytest.approx(best / len(chosen))
        for layer, head in ((0, 2), (3, 5)):
            right, mass = 0, 0.0
            for text, query, key, _ in chosen:
                row = model.run(text, points=["pattern"])["pattern", layer][0, head, query]
                right += max(range(1, query), key=lambda place: float(row[place])) == key
                mass += float(row[key])
            assert float(found.accuracy(name)[layer, head]) == pytest.approx(right / len(chosen))
            assert mass_of(found, name, layer, head) == pytest.approx(mass / len(chosen), abs=1e-5)
        place = found.names.index(name)
        by_text = (found.correct[place] - found.by_offset[place]) / found.pairs[place]
        torch.testing.assert_close(found[name].per_text, by_text, equal_nan=True)
        torch.testing.assert_close(found[name].mean, found.accuracy(name) - found.baselines[name])


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_words_sum_what_they_get_and_average_what_they_give(default: torch.dtype, request: Any) -> None:
    """The demo model reads unknown words as bytes; torch's default precision does not matter."""
    model = models.demo()
    torch.set_default_dtype(default)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    words = ("Zxqv", " gave", " an", " old", " Qwzy", " to", " Clara", ".")
    labels = [(words, 4, 0, "unknown"), (words, 6, 4, "unknown"), (words, 4, 3, "unknown")]
    found = am.relations(model, labels)
    acts = model.run("".join(words), points=["pattern"])
    members: list[list[int]] = []
    tokens, read = acts.tokens[0], 1
    for word in words:
        here = []
        while len("".join(tokens[number] for number in here)) < len(word):
            here.append(read)
            read += 1
        members.append(here)
        assert "".join(tokens[number] for number in here) == word
    assert max(map(len, members)) > 2
    for layer, head in ((0, 1), (2, 6)):
        pattern = acts["pattern", layer][0, head]
        mass = 0.0
        for _, query, key, _ in labels:
            mass += float(pattern[members[query]][:, members[key]].sum(dim=1).mean())
        assert mass_of(found, "unknown", layer, head) == pytest.approx(mass / 3, abs=1e-5)


def test_a_planted_head_is_claimed_and_no_other() -> None:
    """Head 1 of layer 1 attends to the labelled key, whose distance varies."""
    model, rng = models.demo(), Random(1)
    texts = ["Anna sang of shells" + " and waves" * number + "." for number in range(3, 12)]
    places: dict[int, dict[int, int]] = {}
    labels = []
    for text in texts:
        length = model.encode(text).ids.shape[1]
        places[length] = {query: rng.randrange(1, query) for query in range(3, length)}
        labels += [(text, query, key, "planted") for query, key in places[length].items()]

    def planted(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        for query, key in places[pattern.shape[-1]].items():
            pattern[:, 1, query] = 0.01 / pattern.shape[-1]
            pattern[:, 1, query, key] = 0.99
        return pattern

    with model.hooks({("pattern", 1): planted}):
        found = am.relations(model, labels)
    assert found.claims[["layer", "head"]].to_numpy().tolist() == [[1, 1]]
    assert float(found.accuracy("planted")[1, 1]) == 1

    def even(pattern: Tensor) -> Tensor:
        seen = (pattern > 0).to(pattern)
        return seen / seen.sum(dim=-1, keepdim=True)

    # A head that prefers no key finds none.
    with model.hooks({("pattern", 1): even}):
        assert bool((am.relations(model, labels).accuracy("planted")[1] == 0).all())


def test_the_demo_models_relations() -> None:
    """And no heads for labels at random."""
    shuffled = [(*label[:2], Random(n).randrange(label[1]), label[3]) for n, label in enumerate(labelled(30))]
    assert am.relations(models.demo(), shuffled).claims.empty
    found = am.relations(models.demo(), labelled(30))
    best = found.claims.drop_duplicates("relation").set_index("relation")
    assert best.loc["comma", "accuracy"] == 1 and (best.loc["comma", "layer"], best.loc["comma", "head"]) == (0, 6)
    assert "L0H6 for comma (100\u00a0%" in found.lead
    assert found.plot("bracket").data and found.to_html()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([("Anna sang.", 9, 1, "x")], "query 9 is outside the 4 tokens"),
        ([("Anna sang.", 2, -1, "x")], "key -1 is outside"),
        ([("Anna sang.", 1, 2, "x")], "cannot see the later key"),
        ([("Anna sang.", 2, 2, "x")], "must differ"),
        ([("Anna sang.", 2, 0, "x")], "special token"),
        ([("Anna sang.", 2, 1)], "label 0 must be"),
        ([("Anna sang.", 2, 1, 3)], "must be a name"),
        ([((1, 2), 1, 0, "x")], "a string or a list of words"),
        ([], "at least one"),
        ([(("Anna", "", " sang"), 2, 0, "x")], "has no token in"),
    ],
)
def test_labels_that_cannot_be(labels: Any, message: str) -> None:
    refuses(message, am.relations, models.demo(), labels)


def test_special_tokens_that_are_words_are_not_looked_at() -> None:
    """If a head attends most to a special token, the next best word counts; a label at special tokens is refused."""
    model = am.load(models.fresh("llama"), tokenizer=models.tokenizer(adds_bos=True))
    words = (models.WORDS[4], " [PAD]", *(f" {word}" for word in models.WORDS[5:9]))

    def planted(pattern: Tensor) -> Tensor:
        pattern = torch.zeros_like(pattern)
        pattern[..., 2], pattern[..., 1] = 0.7, 0.3
        return pattern

    with model.hooks({("pattern", 1): planted}):
        found = am.relations(model, [(words, 4, 0, "name")])
    assert bool((found.accuracy("name")[1] == 1).all())
    refuses("is a special token, which is left out", am.relations, model, [(words, 4, 1, "name")])


def test_the_lead_says_which_relations_have_too_few_pairs_or_texts() -> None:
    """One relation has too few pairs, and all pairs of another are in one text."""
    model = models.demo()
    of_three = am.relations(model, by_tokens(model)[:9])
    assert of_three.claims.empty and "too few texts" in of_three.lead
    labels = [*by_tokens(model), (TEXTS[0], 3, 1, "rare"), *[(TEXTS[1], 5, key, "bunched") for key in (1, 2, 3, 4, 1)]]
    found = am.relations(model, labels)
    told = f"{len(labels)} labelled pairs ({len(set(labels))} distinct) of 4 relations in 6 texts"
    assert found.lead.startswith(told)
    assert found.lead.endswith("Too few pairs or texts for a claim: rare, bunched.")
    assert not {"rare", "bunched"} & set(found.claims.relation)
    assert am.relations(model, labels[:1]).lead.startswith("1 labelled pair of 1 relation in 1 text: ")
    few = am.relations(model, [(text, 3, 1, f"of text {place}") for place, text in enumerate(TEXTS)])
    assert few.lead.startswith("6 labelled pairs of 6 relations in 6 texts. Too few pairs or texts")


def test_from_the_word_before_it_is_as_if_that_were_the_query() -> None:
    labels = labelled(20)
    shifted = [(text, query - 1, key, name) for text, query, key, name in labels if query - 1 > key]
    found, expected = am.relations(models.demo(), labels, before=True), am.relations(models.demo(), shifted)
    # Other labels of the same relations on the same texts are another measurement.
    one, other = (am.relations(models.demo(), [(TEXTS[0], 3, key, "one")]).provenance for key in (1, 2))
    assert one.inputs == other.inputs and one.options["labels"] != other.options["labels"]
    for name in expected.names:
        assert torch.equal(found.accuracy(name), expected.accuracy(name))
        assert found.baselines[name] == expected.baselines[name]
    of_near = [(TEXTS[0], 4, 1, "far"), *((text, 3, 2, "near") for text in TEXTS)]
    with pytest.raises(InputError, match="before=True leaves no pair of the relation 'near': in each, the key is"):
        am.relations(models.demo(), of_near, before=True)
    with pytest.raises(InputError, match="this model is bidirectional"):
        am.relations(am.load(models.fresh("bert"), tokenizer=models.tokenizer()), labels, before=True)


@pytest.mark.slow
def test_ablating_the_heads_of_a_relation_hurts_what_it_predicts() -> None:
    """Costs more than ablating equally many heads of these layers with the nearest effect on other texts' loss."""
    model = models.demo()
    found = am.relations(model, labelled(120), before=True)
    general = am.ablate_heads(model, documents(12)).effect
    known = {tuple(text) for text, *_ in labelled(120)}
    new = [label for label in labelled(150) if tuple(label[0]) not in known]

    def surprisal(relation: str, heads: list[tuple[int, int]]) -> float:
        zeroed = am.Intervention.zero(heads) if heads else None
        values = []
        with model.intervene(zeroed) if zeroed is not None else nullcontext():
            chosen = [label for label in new if label[3] == relation and label[2] < label[1] - 1]
            for text, of_text in groupby(chosen, key=lambda label: label[0]):
                batch = model.encode("".join(text))
                logits = model.run(batch)["logits"][0].log_softmax(dim=-1)
                words = words_of(model, batch, text)
                for _, query, _, _ in of_text:
                    place = int(words[query].nonzero()[0])
                    values.append(-float(logits[place - 1, batch.ids[0, place]]))
        return sum(values) / len(values)

    for relation in ("comma", "verb-object"):
        here = found.claims[found.claims.relation == relation]
        heads = [(int(layer), int(head)) for layer, head in zip(here.layer, here["head"], strict=True)]
        assert heads
        like: list[tuple[int, int]] = []
        for layer, head in heads:
            others = [each for each in range(8) if (layer, each) not in [*heads, *like]]
            nearest = min(others, key=lambda each: abs(float(general[layer, each] - general[layer, head])))
            like.append((layer, nearest))
        clean = surprisal(relation, [])
        assert surprisal(relation, heads) - clean > 2 * (surprisal(relation, like) - clean) + 0.05, relation
