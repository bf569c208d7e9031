"""Signatures of public functions are readable, and correct."""

import inspect
import pydoc
from typing import Any

import pytest

import attnmech as am
from attnmech.basics.signatures import as_written

PUBLIC = [name for name in am.__all__ if inspect.isfunction(getattr(am, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_signature_of_a_public_function_fits_a_page(name: str) -> None:
    text = str(inspect.signature(getattr(am, name)))
    assert max(map(len, text.splitlines())) < 100
    assert "collections.abc" not in text and "Unpack" not in text


def test_the_signatures_of_a_results_methods_fit_a_page() -> None:
    checked = 0
    for name in am.results.__all__:
        for method, function in inspect.getmembers(getattr(am.results, name), inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("attnmech."):
                text = str(inspect.signature(function))
                assert max(map(len, text.splitlines())) < 100 and "collections.abc" not in text, (name, method)
                checked += 1
    assert checked > 200


def test_what_help_prints_first() -> None:
    printed = pydoc.render_doc(am.ablate_heads, renderer=pydoc.plaintext).splitlines()
    assert printed[2:6] == [
        "ablate_heads(",
        "    model: HookedModel,",
        "    inputs: Inputs | Iterable[Inputs],",
        "    heads: Heads = 'all',",
    ]
    assert printed[15] == "    **options: SweepOptions,"
    assert printed[16] == ") -> HeadEffects"


def test_a_bound_method_leaves_out_self() -> None:
    assert str(inspect.signature(am.HookedModel.check_heads)).startswith("(\n    self,\n    heads:")
    bound = inspect.signature(am.Intervention.attend)
    assert str(bound).startswith("(\n    heads: Heads,\n    to: Literal['uniform', 'self', 'first'],\n    *,")


def test_annotations_stay_what_they_are() -> None:
    def doubled(value: "int | list[int]", *more: int, times: "float" = 2.0) -> "list[Any]":
        return [value, more, times]

    before = inspect.signature(doubled)
    written = inspect.signature(as_written(doubled))
    assert [parameter.annotation for parameter in written.parameters.values()] == [
        parameter.annotation for parameter in before.parameters.values()
    ]
    assert written.return_annotation == before.return_annotation
    assert written.bind(1, times=3.0).kwargs == {"times": 3.0}
    assert str(written) == "(value: int | list[int], *more: int, times: float = 2.0) -> list[Any]"


def test_a_function_without_source_keeps_its_signature() -> None:
    made: dict[str, Any] = {}
    exec("def made(value, *, key=1): ...", made)
    assert str(inspect.signature(as_written(made["made"]))) == "(value, *, key=1)"
