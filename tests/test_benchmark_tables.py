"""The tables of benchmarks/README.md are those that the benchmarks wrote."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from tables import markdown, of_readme  # noqa: E402


def test_the_readme_holds_what_was_measured() -> None:
    text = (BENCHMARKS / "README.md").read_text("utf-8")
    assert of_readme(text) == text, "run: python benchmarks/tables.py"


def test_results_without_a_place_are_an_error(tmp_path: Path) -> None:
    table = {"title": "", "columns": ["", "s"], "rows": [["attnmech", "1.5"], ["a|b", "2"]], "caption": ""}
    (tmp_path / "new.json").write_text(json.dumps({"note": "Once.", "tables": [table]}))
    with pytest.raises(ValueError, match="no place for new"):
        of_readme("# Benchmarks\n", tmp_path)
    made = of_readme("<!-- results/new.json -->\nold\n<!-- end -->\n", tmp_path)
    assert made == f"<!-- results/new.json -->\nOnce.\n\n{markdown(table)}\n<!-- end -->\n"
    assert markdown(table).splitlines()[2:] == ["| **attnmech** | 1.5 |", "| a\\|b | 2 |"]
