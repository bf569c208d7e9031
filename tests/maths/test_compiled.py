"""Where numba cannot compile, torch computes the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest

import attnmech

FOCUS = """
import json, attnmech as am
from attnmech.maths import compiled
model = am.load()
focus = am.attention_focus(model, "The owls and the hens are here.")
print(json.dumps([compiled.loops_run(), model.certificate.ok, model.weights_hash, focus.entropy.tolist()]))
"""


Focused: TypeAlias = tuple[bool, bool, str, list[list[float]]]


def focused(folder: Path = Path(attnmech.__file__).parents[1], **environment: str) -> Focused:
    """What a process of its own computes with the package of a folder."""
    environment |= {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", FOCUS]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs, certified, weights, entropy = json.loads(done.stdout.splitlines()[-1])
    return runs, certified, weights, entropy


@pytest.fixture(scope="module")
def compiled() -> Focused:
    found = focused()
    assert found[0]
    return found


def check_same(found: Focused, compiled: Focused) -> None:
    assert not found[0] and found[1]
    assert found[2] == compiled[2]
    for ours, theirs in zip(found[3], compiled[3], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_numba_that_is_switched_off(compiled: Focused) -> None:
    check_same(focused(NUMBA_DISABLE_JIT="1"), compiled)


def test_no_folder_for_compiled_code(compiled: Focused, tmp_path: Path) -> None:
    """As in a container whose user may write neither where packages are installed nor at home."""
    package = shutil.copytree(
        Path(attnmech.__file__).parent, tmp_path / "attnmech", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__pycache__").write_text("")  # a file where numba would make a folder: also root cannot
    nowhere = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache"}
    check_same(focused(tmp_path, PYTHONDONTWRITEBYTECODE="1", NUMBA_CACHE_DIR="", **nowhere), compiled)
