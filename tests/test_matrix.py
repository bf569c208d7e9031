"""Every public call works on every family of the docs, or raises an `AttnmechError`, as the docs say."""

from dataclasses import replace
from pathlib import Path

import matrix
import pytest
from test_examples import example

calls = example("calls")


OFTEN = tuple(next(iter(next(iter(row.values())))) for row in matrix.FAMILIES.values())
"""The models of every run of the tests: the first of each row of the table."""


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in matrix.models_of_all()]
)
def test_calls_do_what_their_page_says(kind: str, tmp_path: Path, unchecked: None) -> None:
    """The model's share of the calls, and all calls that the page lists as refused; a call that the page does not list
    may be refused, too.

    After an intended change: `python examples/architectures.py --calls`, which makes every call on every model.
    """
    expected = calls.stored()[kind]
    refused = {cell.partition(" (")[0] for cell in expected.refused}
    share = matrix.calls_of(kind) | {name: matrix.CALLS[name] for name in refused}
    row = matrix.row_of(matrix.models_of_all()[kind], tmp_path, share, calls.listed())
    known = {call: why for call, why in row.refused.items() if call.partition(" (")[0] in calls.listed()}
    assert replace(row, refused=known) == expected


def test_every_row_makes_every_call_and_every_model_some() -> None:
    for row in matrix.FAMILIES.values():
        shares = [matrix.calls_of(kind) for members in row.values() for kind in members]
        assert set().union(*shares) == set(matrix.CALLS) and all(shares)


def test_the_table_in_the_docs_is_that_of_the_page() -> None:
    text = calls.MODELS.read_text("utf-8")
    assert calls.with_table(calls.stored(), text) == text
