"""Every public function lists its arguments, what it returns and what it raises, in one convention."""

import inspect
import re
from operator import attrgetter

import pytest

import attnmech as am

FUNCTIONS = {name: getattr(am, name) for name in am.__all__ if inspect.isfunction(getattr(am, name))}
CALLS = {
    f"HookedModel.{name}": getattr(am.HookedModel, name)
    for name in ("run", "hooks", "intervene", "generate", "loss", "encode")
} | {
    f"Intervention.{name}": getattr(am.Intervention, name)
    for name in ("zero", "replace", "attend", "remove_keys", "cut", "scale", "zero_values", "replace_values", "stream")
}
NEVER_RAISE = ("certify", "untrained")


def arguments(doc: str) -> list[str]:
    """The names that the docstring lists."""
    listed = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, flags=re.M)
    return [] if listed is None else re.findall(r"^    (\w+): \S", listed[1], flags=re.M)


@pytest.mark.parametrize("name", [*FUNCTIONS, *CALLS])
def test_all_arguments_are_listed_in_their_order(name: str) -> None:
    function = (FUNCTIONS | CALLS)[name]
    assert arguments(inspect.getdoc(function) + "\n") == [
        each for each in inspect.signature(function).parameters if each not in ("self", "cls")
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_comes_back_and_what_is_raised(name: str) -> None:
    doc = inspect.getdoc(FUNCTIONS[name])
    assert "\nReturns:\n    " in doc and ">>> " in doc
    assert name in NEVER_RAISE or re.search(r"\nRaises:\n    \w+Error: ", doc)


@pytest.mark.parametrize("name", [*am.__all__, *(f"results.{name}" for name in am.results.__all__)])
def test_every_public_name_says_what_it_is(name: str) -> None:
    doc = inspect.getdoc(attrgetter(name)(am))
    assert doc and len(doc.splitlines()[0]) > 20
