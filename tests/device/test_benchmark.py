"""The benchmark of accelerators runs, with a tiny model, on `fake_device.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_RUN = f"""
import os, runpy, sys
import fake_device
fake_device.install()
sys.argv = ["gpu.py", "--device", fake_device.NAME, "--tiny", "--repeats", "1", "--json", sys.argv[1]]
runpy.run_path({str(BENCHMARKS / "gpu.py")!r}, run_name="__main__")
sys.stdout.flush()
os._exit(0)  # torch ends before Python does, and would call back into the device
"""


@pytest.mark.slow
def test_the_benchmark_measures_a_tiny_model_on_the_device(tmp_path: Path) -> None:
    folders = str(BENCHMARKS), str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path / "gpu.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    differences, *costs = figures["tables"]
    assert len(differences["rows"]) == 5
    assert all(float(largest) < 1e-4 for _, largest, _ in differences["rows"])
    assert {row["contender"] for row in figures["rows"]} > {"attnmech, run", "attnmech, report"}
    assert all(row["seconds"] > 0 for row in figures["rows"])
    assert len(costs) == 2
