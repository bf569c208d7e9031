"""A model on a device that is not the CPU gives what it gives on the CPU: `fake_device.py`, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "kinds",
    [("gpt2", "bloom", "llama", "vit"), ("t5", "gemma3_text", "phi"), ("bert", "gpt_neox", "qwen3")],
    ids=" ".join,
)
def test_results_are_those_of_the_cpu(kinds: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "on_device.py"), str(tmp_path), *kinds]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = dict(map(json.loads, done.stdout.splitlines()))
    assert tuple(differences) == kinds
    for kind, by_result in differences.items():
        assert len(by_result) > 25
        assert {name: value for name, value in by_result.items() if not value < 1e-5} == {}, kind
