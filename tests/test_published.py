"""The scripts that compare attnmech with published results run, and docs/published.md shows their tables."""

import math
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "published"
PAGE = (ROOT / "docs" / "published.md").read_text("utf-8")

TINY = {"induction": ["--seeds", "2", "--steps", "20"]}


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_every_script_is_tried_out_and_described() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} - {"shared"} == set(TINY)
    for name in TINY:
        assert f"`python benchmarks/published/{name}.py`" in PAGE


@pytest.mark.parametrize("name", TINY)
def test_a_script_prints_the_rows_of_its_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TINY[name]])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    printed = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) > 3
    for row in printed[2:]:
        assert f"\n{row} |" in PAGE


def test_the_drop_is_read_from_the_first_step_below() -> None:
    induction = runpy.run_path(str(SCRIPTS / "induction.py"))
    losses = {0: 4.0, 10: 3.0, 20: 2.0, 30: 2.5, 40: 1.0}
    assert induction["below"](losses, high=3.0, low=1.0, share=0.5) == 20
    assert math.isnan(induction["below"](losses, high=1.0, low=0.0, share=0.5))
    assert induction["nearest"]({0: 0.1, 50: 0.7}, 30) == 0.7
    assert math.isnan(induction["nearest"]({0: 0.1}, math.nan))
    assert runpy.run_path(str(SCRIPTS / "shared.py"))["spread"]([0.5, 0.7, 0.9]) == "0.70 (0.50 to 0.90)"
