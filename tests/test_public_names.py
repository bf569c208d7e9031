"""Public names: a few at the top, the others in named modules, all imported on first use."""

import subprocess
import sys

import pytest

import attnmech as am

MOVED = [
    (module, name)
    for module in ("results", "errors", "reducers", "architecture")
    for name in dir(getattr(am, module))
    if name[0].isupper() and not name.isupper() and name not in am.__all__
]


def test_the_top_level_has_few_names() -> None:
    assert len(am.__all__) <= 65 and dir(am) == am.__all__
    assert all(hasattr(am, name) for name in am.__all__)


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_a_name_of_a_module_is_not_at_the_top(module: str, name: str) -> None:
    """For results, errors and parts of reducers, the error says where each is."""
    assert isinstance(getattr(getattr(am, module), name), type)
    with pytest.raises(AttributeError, match=rf"^attnmech\.{name} is now am\.{module}\.{name}$"):
        getattr(am, name)


def test_an_import_from_the_top_says_the_same() -> None:
    """In a separate process: checked annotations put a frame between the import and the package."""
    assert len(MOVED) == 77
    tries = [
        f"try:\n    from attnmech import {name}\nexcept ImportError as error:\n    print(error)" for _, name in MOVED
    ]
    script = [sys.executable, "-c", "\n".join(tries)]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"attnmech.{name} is now am.{module}.{name}" for module, name in MOVED]


@pytest.mark.parametrize("module", ["attnmech", "attnmech.results", "attnmech.reducers", "attnmech.architecture"])
def test_an_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module} as module; dir(module); print('torch' in sys.modules, hasattr(module, 'nonsense'))"
    script = [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False", "False"]


def test_an_unknown_name_of_a_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'attnmech\.results' has no attribute 'HeadEffect'$"):
        am.results.HeadEffect
    with pytest.raises(ImportError, match=r"cannot import name 'HeadEffect' from 'attnmech\.results'"):
        exec("from attnmech.results import HeadEffect", {})
