"""The strongest rows of both halves of a corpus: against a search, planted heads, and divisions drawn another way."""

import math
from collections import Counter
from random import Random
from typing import Final

import models
import planted
import pytest
import torch
from example_rows import TEXTS, naive, places, places_of, strongest, texts_of

import attnmech as am
from attnmech.methods.examples.formulas import RELATIONS, difference_of_halves, relations

HALVES: Final = (("even", 0), ("odd", 1))


def relation(query: int, key: int | None, ids: list[int]) -> str:
    """What a key is to a query, in words."""
    if key is None:
        return "no key"
    if key == query:
        return "itself"
    if key == 0:
        return "first token"
    if key == query - 1:
        return "previous token"
    if key == query + 1:
        return "next token"
    if key > query:
        return "later"
    if ids[key] == ids[query]:
        return "same token"
    return "2–8 back" if query - key <= 8 else "farther back"


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize(("name", "layer", "head", "count"), [("gpt2", 0, 3, 60), ("llama", 1, 4, 12)])
def test_the_strongest_rows_of_each_half_are_those_of_a_search(name: str, layer: int, head: int, count: int) -> None:
    model, texts = models.hooked(name, torch.float64), TEXTS[:count]
    rows = naive(model, texts, layer, head)
    examples = am.examples(model, iter(texts), k=10)
    frame = examples.halves().set_index(["layer", "head"]).loc[(layer, head)]
    for half, number in HALVES:
        chosen = examples.examples_of(layer, head, half)
        assert places(chosen) == places_of(strongest([row for row in rows if row.text % 2 == number], 10))
        assert {example.kind for example in chosen} == {half}
        common = Counter(example.relation for example in chosen)
        assert frame[f"{half}_rows"] == len(chosen) and frame[f"{half}_count"] == max(common.values())
        assert common[frame[f"{half}_relation"]] == max(common.values())


@pytest.mark.parametrize(
    ("name", "by"), [("gpt2", "value_weighted"), ("bert", "attention"), ("bert", "value_weighted")]
)
def test_the_relation_of_a_row_is_that_of_its_highest_key(name: str, by: str) -> None:
    """BERT's rows also see later tokens."""
    model, texts = models.hooked(name), texts_of(count=30, longest=19)
    examples = am.examples(model, iter(texts), by=by, k=50)
    patterns = [model.run(ids[None], points=["pattern"]) for ids in texts]
    seen = set()
    for layer, head in ((layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)):
        for example in examples.examples_of(layer, head, "random") + examples.examples_of(layer, head):
            ids, at = texts[example.text].tolist(), example.position
            row = patterns[example.text]["pattern", layer][0, head, at, : at + 1 if model.causal else None].tolist()
            counted = [key for key in range(len(row)) if by != "attention" or key not in (0, at)]
            assert example.relation == relation(at, max(counted, key=row.__getitem__), ids)
            seen.add(example.relation)
    expected = {"previous token", "2–8 back", "farther back", "same token"}
    expected |= {"itself", "first token"} if by != "attention" else set()
    assert seen >= expected | ({"next token", "later"} if name == "bert" else set())


@pytest.mark.core
def test_halves_that_differ() -> None:
    """The head looks for a cue: in texts with even numbers it is eleven tokens back, in the others two."""
    model, rng = planted.blank(planted.MAKERS["llama"]), Random(3)
    planted.look(model, (1, 3), {planted.ASK: planted.CUES[0]})
    texts = []
    for number in range(40):
        text = [rng.randrange(planted.FIRST, planted.LAST) for _ in range(14)]
        text[11 if number % 2 else 2] = planted.CUES[0]
        text[12:] = planted.FIRST + number // 2, planted.ASK
        texts.append(torch.tensor([planted.BOS, *text]))
    examples = am.examples(model, iter(texts), k=10)
    row = examples.halves().set_index(["layer", "head"]).loc[(1, 3)]
    for half, expected in (("even", "farther back"), ("odd", "2–8 back")):
        assert row[f"{half}_relation"] == expected and row[f"{half}_count"] == row[f"{half}_rows"] == 10
    assert row["distance"] == 1 and row["p"] < 0.01


def drawn(relations: list[str], texts: list[int], k: int, divisions: int = 4000) -> tuple[float, float]:
    """The distance of the halves, and its p-value, with divisions drawn by Python."""

    def distance(odd: list[bool]) -> float:
        halves = [[r for r, is_odd in zip(relations, odd, strict=True) if is_odd == half][:k] for half in (False, True)]
        if not all(halves):
            return math.nan
        shares = [{name: Counter(half)[name] / len(half) for name in relations} for half in halves]
        return sum(abs(shares[0][name] - shares[1][name]) for name in set(relations)) / 2

    rng, real = Random(1), distance([text % 2 == 1 for text in texts])
    random = [distance([rng.random() < 0.5 for _ in texts]) for _ in range(divisions)]
    return real, sum(not value < real - 1e-9 for value in random) / divisions


@pytest.mark.parametrize("k", [1, 10])
def test_p_is_the_share_of_divisions_that_differ_as_much(k: int) -> None:
    rng = Random(k)
    rows = [[rng.choice(RELATIONS[2:5]) for _ in range(24)] for _ in range(6)]
    rows[0] = [RELATIONS[2 + text % 2] for text in range(24)]
    texts = [rng.sample(range(100), 24) for _ in rows]
    texts[0] = list(range(24))
    _, distance, p_value = difference_of_halves(
        torch.tensor([[RELATIONS.index(name) for name in row] for row in rows]), torch.tensor(texts), k
    )
    for number, row in enumerate(rows):
        real, p = drawn(row, texts[number], k)
        assert float(distance[number]) == pytest.approx(real)
        assert float(p_value[number]) == pytest.approx(p, abs=0.03)


def test_p_holds_where_the_relation_depends_on_the_value() -> None:
    """In corpora without halves, p is below 0.05 in at most one of twenty, although the first 15 rows differ from the
    others, so that the halves' first ten rows are not independent draws.
    """
    heads, generator = 400, torch.Generator().manual_seed(0)
    text = torch.stack([torch.randperm(200, generator=generator)[:60] for _ in range(heads)])
    relation = torch.full((heads, 60), 4)
    relation[:, 15:] = 3
    _, _, p = difference_of_halves(relation, text, 10)
    assert 0.0 < float((p < 0.05).double().mean()) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / heads)


def test_p_is_nan_without_rows_in_a_half() -> None:
    examples = am.examples(models.hooked("gpt2"), TEXTS[1][None])
    frame = examples.halves()
    assert frame["odd_rows"].eq(0).all() and frame["odd_relation"].eq("").all() and frame["even_rows"].gt(0).all()
    assert frame["p"].isna().all() and frame["distance"].isna().all()


def test_rows_that_attend_to_nothing_else() -> None:
    model = models.hooked("gpt2")
    with model.hooks({("pattern", 1): lambda pattern: torch.eye(pattern.shape[-1]).expand_as(pattern)}):
        examples = am.examples(model, iter(TEXTS), k=3)
    assert {example.relation for example in examples.examples_of(1, 0)} == {"no key"}


def test_keys_that_are_not_tokens() -> None:
    index = relations(*torch.tensor([[3, 3, 0], [9, -1, 0], [5, 5, 5], [-1, -1, 5]]))
    assert [RELATIONS[number] for number in index.tolist()] == ["not a token", "no key", "itself"]
