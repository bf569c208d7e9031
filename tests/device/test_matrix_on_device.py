"""A model on one or two devices other than the CPU gives the same results as on the CPU: `fake_device.py`, in
processes.

Every model makes a few common calls and its share of the others, also on a device that refuses float64, like Apple's
MPS.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from matrix import CALLS
from test_examples import example

HERE: Final = Path(__file__).parent
MODELS: Final = {
    ("gpu", "float64"): (
        ("gpt2", "bloom", "llama", "vit"), ("t5", "gemma3_text", "phi"), ("bert", "gpt_neox", "qwen3", "longformer"),
    ),
    ("gpu", "none"): (("gpt2", "qwen3"), ("bert", "t5")),
    ("gpu:0,cpu", "float64"): (("llama", "jamba"), ("t5", "gpt2", "falcon")),
    ("gpu:0,gpu:1", "float64"): (("qwen3", "phi", "bert", "vit"),),
    ("cpu,gpu:0", "float64"): (("gpt_neox", "deberta"),),
}  # fmt: skip
"""By devices, and whether they have float64: the models of each process."""
OF_ALL: Final = ("run", "attention_focus", "residual_updates", 'decompose_scores(centre="mean")')
OF_NONE: Final = ("certify", "untrained")
"""Their numbers are rounding errors; `load` makes a certificate."""
SPLIT: Final = ("report", "intervene", "ablate_heads", "residual_drift")
DIFFERENTIATED: Final = ("gradients", "generate", "patch")
"""torch's engine of gradients knows one device of this kind."""


def shares(devices: str, float64: str) -> dict[str, list[str]]:
    """The calls of each model: the common ones, and every other call on the next model that supports it."""
    kinds = [kind for group in MODELS[devices, float64] for kind in group]
    refused = {
        kind: {cell.partition(" (")[0] for cell in row.refused} for kind, row in example("calls").stored().items()
    }
    made = {kind: [name for name in OF_ALL if name not in refused[kind]] for kind in kinds}
    others = [name for name in CALLS if name not in (*OF_ALL, *OF_NONE)]
    if "," in devices:
        others = [*SPLIT, *(DIFFERENTIATED if "cpu" in devices else ())]
    for number, name in enumerate(others):
        turn = number % len(kinds)
        able = [kind for kind in (*kinds[turn:], *kinds[:turn]) if name not in refused[kind]]
        made[able[0]].append(name) if able else None
    return made


@pytest.mark.parametrize(
    ("devices", "float64", "kinds"), [(*mode, kinds) for mode, groups in MODELS.items() for kinds in groups], ids=str
)
def test_results_are_those_of_the_cpu(devices: str, float64: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    every = shares(devices, float64)
    calls = json.dumps({kind: every[kind] for kind in kinds})
    folders = str(HERE.parent), str(HERE.parents[1] / "benchmarks"), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, str(HERE / "on_device.py"), str(tmp_path), devices, float64, calls],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    differences = dict(json.loads(line) for line in done.stdout.splitlines())
    assert tuple(differences) == kinds
    for kind, by_number in differences.items():
        assert len(by_number) > 25
        assert {name: value for name, value in by_number.items() if not value < 1} == {}, kind


@pytest.mark.parametrize("float64", ["float64", "none"])
def test_every_call_is_made_on_a_device(float64: str) -> None:
    missing = set(CALLS).difference(OF_NONE, *shares("gpu", float64).values())
    assert missing == ({"global_attention"} if float64 == "none" else set())
