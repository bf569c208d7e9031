"""Every public call on every family of the README works, or an `AttnmechError` says why not; the README says which."""

from pathlib import Path

import matrix
import pytest
from test_examples import example

import attnmech as am

calls = example("calls")


@pytest.mark.parametrize("kind", matrix.models_of_all())
def test_every_call_does_what_its_page_says(kind: str, tmp_path: Path, unchecked: None) -> None:
    """After a change that is meant: `python examples/architectures.py --calls`."""
    found, expected = matrix.row_of(matrix.models_of_all()[kind], tmp_path), calls.stored()[kind]
    assert found.refused == expected.refused
    assert found.cells == expected.cells


def test_the_readmes_table_is_that_of_the_page() -> None:
    text = calls.README.read_text("utf-8")
    assert calls.readme(calls.stored(), text) == text


def test_every_public_function_is_called() -> None:
    functions = {name for name in am.__all__ if name[0].islower() and callable(getattr(am, name))}
    named = {name.partition("(")[0] for name in matrix.CALLS}
    assert functions - {"load"} <= named
