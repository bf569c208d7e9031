"""The tables of benchmarks/README.md and docs/truth.md are those that the benchmarks wrote."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from tables import PAGES, markdown, updated  # noqa: E402


def test_pages_hold_what_was_measured() -> None:
    texts = [path.read_text("utf-8") for path in PAGES]
    assert updated(texts) == texts, "run: python benchmarks/tables.py"


def test_results_without_a_place_are_an_error(tmp_path: Path) -> None:
    table = {"title": "", "columns": ["", "s"], "rows": [["attnmech", "1.5"], ["a|b", "2"]], "caption": ""}
    (tmp_path / "new.json").write_text(json.dumps({"note": "Once.", "tables": [table]}))
    with pytest.raises(ValueError, match="no page has a place for new"):
        updated(["# Benchmarks\n"], tmp_path)
    _, made = updated(["# Benchmarks\n", "<!-- results/new.json -->\nold\n<!-- end -->\n"], tmp_path)
    assert made == f"<!-- results/new.json -->\nOnce.\n\n{markdown(table)}\n<!-- end -->\n"
    assert markdown(table).splitlines()[2:] == ["| **attnmech** | 1.5 |", "| a\\|b | 2 |"]
