"""A model on other devices than the CPU, one or two, gives what it gives there: `fake_device.py`, in processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ("gpu", ("gpt2", "bloom", "llama", "vit")),
        ("gpu", ("t5", "gemma3_text", "phi")),
        ("gpu", ("bert", "gpt_neox", "qwen3")),
        ("gpu:0,cpu", ("llama", "jamba")),
        ("gpu:0,cpu", ("t5", "gpt2", "falcon")),
        ("gpu:0,gpu:1", ("qwen3", "phi", "bert", "vit")),
        ("cpu,gpu:0", ("gpt_neox", "deberta")),
    ],
    ids=str,
)
def test_results_are_those_of_the_cpu(devices: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "on_device.py"), str(tmp_path), devices, *kinds]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = dict(json.loads(line) for line in done.stdout.splitlines())
    assert tuple(differences) == kinds
    for kind, by_result in differences.items():
        assert len(by_result) > 25
        assert {name: value for name, value in by_result.items() if not value < 1e-5} == {}, kind
