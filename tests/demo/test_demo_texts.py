"""The texts and cases that attnmech comes with are those of the grammar."""

from collections import defaultdict
from itertools import islice

import pytest
from language.cases import TASKS, cases
from write_texts import case_line, documents, relations_line

from attnmech.demo import tasks, text
from attnmech.errors import InputError

SEEDS = range(len(text.STORED))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shipped_file_is_what_the_script_writes(seed: int) -> None:
    fresh, count = documents(20, seed), text.STORED[seed]
    assert text.documents(20, seed) == [document.text for document in fresh]
    assert text.labelled(20, seed) == [
        (document.words, link.query, link.key, link.relation) for document in fresh for link in document.relations
    ]
    assert text.stored(f"relations/{seed}")[:20] == list(map(relations_line, fresh))
    assert len(text.documents(count, seed)) == len(text.stored(f"relations/{seed}")) == count
    for task, (_, templates) in TASKS.items():
        lines = text.stored(f"cases/{task}/{seed}")
        assert lines[:10] == list(map(case_line, islice(cases(task, seed), 10)))
        assert len(lines) == templates * tasks.PER_TEMPLATE


def test_no_two_seeds_share_a_text() -> None:
    stored = [line for seed in SEEDS for line in text.documents(text.STORED[seed], seed)]
    assert len(set(stored)) == len(stored)


def test_the_first_templates_to_have_enough_cases_are_chosen() -> None:
    made = defaultdict(list)
    for case in cases("recipient", 2):
        made[case.template].append(case)
        full = [name for name in made if len(made[name]) >= 3]
        if len(full) == 4:
            break
    assert len(made) > 4
    chosen = tasks.cases_of("recipient", 4, 3, seed=2)
    assert chosen == [case for name in sorted(full) for case in made[name][:3]]


@pytest.mark.parametrize(("count", "seed"), [(2001, 0), (201, 5), (1, 6), (-1, 0), (1, -1)])
def test_more_texts_than_are_stored(count: int, seed: int) -> None:
    with pytest.raises(InputError, match="has 2,000 texts for seed 0 and 200 for each of the seeds 1 to 5; got count="):
        text.labelled(count, seed)


@pytest.mark.parametrize(("name", "value"), [("count", 9), ("seed", 6), ("task", "x"), ("templates", 41)])
def test_cases_that_are_not_stored(name: str, value: object) -> None:
    with pytest.raises(
        InputError, match=rf"(1 to 8|0 to 5|copying, agreement, gender, recipient|1 to 40); got '?{value}"
    ):
        tasks.cases_of(**{"task": "gender", name: value})  # type: ignore[arg-type]
