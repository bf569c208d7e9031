"""Every public function lists its arguments, what it returns and what it raises, and all examples are true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from operator import attrgetter

import language
import pytest

import attnmech
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


NAMES = [module.name for module in pkgutil.walk_packages(attnmech.__path__, "attnmech.")]
NAMES.remove("attnmech.engines.vllm")  # of another environment
NAMES += ["train", *(module.name for module in pkgutil.iter_modules(language.__path__, "language."))]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_of_a_module_is_true(name: str) -> None:
    importlib.import_module(name)
    # From `sys.modules`, because the attribute `report` of the package is the function, not the module.
    assert doctest.testmod(sys.modules[name]).failed == 0
