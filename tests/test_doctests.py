"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil
import sys

import language
import pytest

import attnmech

NAMES = [module.name for module in pkgutil.walk_packages(attnmech.__path__, "attnmech.")]
NAMES += ["train", *(module.name for module in pkgutil.iter_modules(language.__path__, "language."))]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_of_a_module_is_true(name: str) -> None:
    importlib.import_module(name)
    # From `sys.modules`, because the attribute `report` of the package is the function, not the module.
    assert doctest.testmod(sys.modules[name]).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in NAMES for test in finder.find(sys.modules.get(name) or importlib.import_module(name))]
    assert sum(len(test.examples) for test in found) > 30
