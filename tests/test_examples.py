"""The worked examples run, and say what their docstrings promise."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_which_heads_carry_a_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ablation = example("ablation")
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--cases", "12"])
    monkeypatch.setattr(ablation, "DRAWS", 2)
    ablation.main()
    printed = capsys.readouterr().out
    for task in ("verb agrees across a noun", "next word of a repeated span", "the recipient's name"):
        assert task.split()[0] in printed


def test_holms_correction() -> None:
    """The textbook's four p-values: 4 × 0.005, 3 × 0.01, 2 × 0.03, and never falling."""
    corrected = example("ablation").holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
