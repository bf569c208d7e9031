"""The worked examples run, and say what their docstrings promise."""

import importlib.util
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_control_heads_are_matched() -> None:
    """In the layer of the head that each stands for, none twice, and none that matters to the task."""
    ablation = example("ablation")
    effect = torch.full((2, 8), 0.1)
    effect[0, :7] = effect[1, 2] = -1.0
    effects = SimpleNamespace(effect=effect, simultaneous=lambda: (effect - 0.2, effect + 0.2))
    general = torch.arange(16.0).view(2, 8)
    for seed in range(20):
        drawn = ablation.controls([(0, 0), (0, 1), (1, 2)], effects, general, Random(seed))
        assert len(set(drawn)) == 3 and all(float(effect[head]) > 0 for head in drawn)
        assert drawn[0] == (0, 7) and drawn[1] in [(1, 0), (1, 1), (1, 3)]
        assert drawn[2][0] == 1 and abs(drawn[2][1] - 2) <= 3


def test_an_accuracy_has_wilsons_interval() -> None:
    assert example("ablation").share(9, 10) == "0.90 (0.60 to 0.98)"
