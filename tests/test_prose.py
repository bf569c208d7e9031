"""The English of the project: `prose.py` finds planted patterns, and finds none in the package and its pages."""

import json
from pathlib import Path

import pytest
from prose import EMPTY_NAMES, places_in, places_under

ROOT = Path(__file__).parents[1]

DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"made", "_build"} & set(path.parts)),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.ipynb")),
)


PLANTED = {
    "module.py": '"""Which head attends there?"""\n',
    "docstring.py": 'def f():\n    """The heads, of which two are shown."""\n',
    "comment.py": "x = 1  # in such a case\n",
    "string.py": 'raise ValueError("give it by the way of a list")\n',
    "f_string.py": 'message = f"{1} heads, as many as there are layers"\n',
    "name.py": "for each in range(3):\n    print(each)\n",
    "argument.py": "def f(found):\n    return found\n",
    "twice.py": '"""Draws Draws a map."""\n',
    "joint.py": '"""The correlation before " "projection."""\n',
    "many.py": '"""How many heads there are."""\n',
    "page.md": "# Title\n\nRows sum to 1, less the sink's mass.\n",
    "notebook.ipynb": json.dumps(
        {"cells": [{"cell_type": "markdown", "source": ["Sequences of random tokens,\n", "each twice.\n"]}]}
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_sentence_is_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(PLANTED[name], encoding="utf-8")
    places = places_under(tmp_path)
    assert len(places) == 1 and places[0].path == path
    assert str(places[0]).startswith(f"{path}:{places[0].line}: ")


def test_code_in_a_page_or_a_notebook_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Text.\n\n```python\nfor each in found:  # of which\n    pass\n```\n")
    cells = [{"cell_type": "code", "source": ["# heads, of which two\n"]}]
    (tmp_path / "notebook.ipynb").write_text(json.dumps({"cells": cells}))
    assert places_under(tmp_path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_holds_no_pattern(path: Path) -> None:
    assert list(places_in(path)) == []


def test_the_package_holds_no_pattern() -> None:
    package = ROOT / "attnmech"
    assert {"maths", "results", "basics", "__init__.py"} <= {path.name for path in package.iterdir()}
    assert places_under(package) == []


def test_tests_and_scripts_hold_no_pattern() -> None:
    places = places_under(*(ROOT / folder for folder in ("tests", "benchmarks", "examples", "docs/_site")))
    listed = {ROOT / "tests/prose.py", ROOT / "tests/test_prose.py"}
    assert [place for place in places if place.path not in listed and place.words not in EMPTY_NAMES] == []
