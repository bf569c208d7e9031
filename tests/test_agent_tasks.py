"""The tasks for agents: their answers over the protocol are those that the planted weights give."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "agent_tasks"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *arguments], capture_output=True, text=True, check=False
    )


def test_the_tools_answer_all_tasks() -> None:
    tasks = json.loads((FOLDER / "tasks.json").read_text(encoding="utf-8"))
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(tasks)} of {len(tasks)} right" in done.stdout and len(tasks) == 10
    assert re.findall(r"^\| (\w+) \|", done.stdout, re.M)[1:] == [task["name"] for task in tasks]


@pytest.mark.slow
def test_a_wrong_answer_is_seen(tmp_path: Path) -> None:
    """Without the line that plants L1H2, the tasks about it fail."""
    for name in ("run.py", "tasks.json", "planted.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    planted = (tmp_path / "planted.py").read_text(encoding="utf-8")
    line = next(line for line in planted.splitlines() if "_plant(model, (1, 2)" in line)
    (tmp_path / "planted.py").write_text(planted.replace(line, ""), encoding="utf-8")
    done = subprocess.run([sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stderr
    wrong = re.findall(r"^\| (\w+) \|.*\| NO \|", done.stdout, re.M)
    assert {"looks", "confirmed", "patched"} <= set(wrong) and "previous" not in wrong
