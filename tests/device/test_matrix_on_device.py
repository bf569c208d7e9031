"""A model on one or two devices other than the CPU gives the same results as on the CPU: `fake_device.py`, in
processes.

Every model makes a few common calls and its share of the others, also on a device that refuses float64, like Apple's
MPS.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import models
import pytest
from comparing import printed_by
from matrix import CALLS
from test_examples import example

import attnmech as am

HERE: Final = Path(__file__).parent
PROCESSES: Final[tuple[tuple[str, dict[str, tuple[str, ...]]], ...]] = (
    ("float64", {"gpu": ("gpt2", "bloom", "llama", "gpt_neox", "bert", "vit")}),
    ("float64", {"gpu": ("t5", "gemma3_text", "phi", "qwen3", "longformer")}),
    ("none", {"gpu": ("gpt2", "qwen3", "bert", "t5")}),
    ("float64", {
        "gpu:0,cpu": ("llama", "jamba", "t5", "gpt2", "falcon"), "gpu:0,gpu:1": ("qwen3", "bert", "vit"),
        "cpu,gpu:0": ("gpt_neox", "deberta"),
    }),
)  # fmt: skip
"""The models of each process, by devices, and whether these have float64."""
SLOW: Final = "longformer"
"""Its texts are padded to its window, so it makes only the calls that all make and those that no other model can."""
OF_ALL: Final = ("run", "attention_focus", "residual_updates", 'decompose_scores(centre="mean")')
OF_NONE: Final = ("certify", "untrained")
"""Their numbers are rounding errors; `load` makes a certificate."""
SPLIT: Final = ("intervene", "ablate_heads", "residual_drift")
DIFFERENTIATED: Final = ("gradients", "generate", "patch")
OF_SPLIT: Final = {
    "gpu:0,cpu": ("report", *SPLIT, *DIFFERENTIATED), "gpu:0,gpu:1": SPLIT, "cpu,gpu:0": (*SPLIT, *DIFFERENTIATED),
}  # fmt: skip
"""The other calls on two devices: torch knows gradients of one device of this kind, and a report takes ten seconds."""


def shares(devices: str, float64: str) -> dict[str, list[str]]:
    """The calls of each model: the common ones, and every other call on the next model that supports it."""
    kinds = [kind for has, models in PROCESSES if has == float64 for kind in models.get(devices, ())]
    refused = {
        kind: {cell.partition(" (")[0] for cell in row.refused} for kind, row in example("calls").stored().items()
    }
    made = {kind: [name for name in OF_ALL if name not in refused[kind]] for kind in kinds}
    others = OF_SPLIT.get(devices, [name for name in CALLS if name not in (*OF_ALL, *OF_NONE)])
    in_turn = [kind for kind in kinds if kind != SLOW]
    for number, name in enumerate(others):
        turn = number % len(in_turn)
        able = [kind for kind in (*in_turn[turn:], *in_turn[:turn], *kinds) if name not in refused[kind]]
        made[able[0]].append(name) if able else None
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("float64", "models"), PROCESSES, ids=[f"{has}-{'; '.join(models)}" for has, models in PROCESSES]
)
def test_results_are_those_of_the_cpu(float64: str, models: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    calls = {devices: {kind: shares(devices, float64)[kind] for kind in kinds} for devices, kinds in models.items()}
    assert min(compare(float64, calls, tmp_path)) > 25


def test_common_calls_on_devices(tmp_path: Path) -> None:
    calls = [*OF_ALL, "ablate_heads", "patch"]
    compare("none", {"gpu": {"llama": calls}, "gpu:0,cpu": {"gpt2": ["run"]}}, tmp_path)


def compare(float64: str, calls: dict[str, dict[str, list[str]]], tmp_path: Path) -> list[int]:
    """Makes the calls of each model on its devices and on the CPU; returns how many numbers each model compares."""
    rows = printed_by(HERE / "on_device.py", str(tmp_path), float64, json.dumps(calls))
    assert [(devices, kind) for devices, kind, _ in rows] == [
        (devices, kind) for devices, kinds in calls.items() for kind in kinds
    ]
    for devices, kind, by_number in rows:
        assert {name: value for name, value in by_number.items() if not value < 1} == {}, (devices, kind)
    return [len(by_number) for _, _, by_number in rows]


@pytest.mark.parametrize("float64", ["float64", "none"])
def test_every_call_is_made_on_a_device(float64: str) -> None:
    assert not set(CALLS).difference(OF_NONE, *shares("gpu", float64).values())


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


MOVED = {
    f"{what} to a model on {place}"
    for what in ("ids", "batch", "vectors", "a hook's pattern")
    for place in ("cpu", "gpu")
}


def test_what_lies_elsewhere_is_moved_or_refused() -> None:
    answers = dict(printed_by(HERE / "misplaced.py"))
    assert {name for name, answer in answers.items() if isinstance(answer, float) and answer < 1e-4} == MOVED
    assert "on the meta device" in answers["half a model"]
    assert "'gpu' has no float64; use dtype=\"float32\"" in answers["float64"]
    for name in ("a default device", "a run with a default device"):
        assert "needs the CPU as torch's default device, and 'gpu" in answers[name]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(am.errors.InputError, match=r"device 'mps' cannot be used here \(.*\); try \"cpu\""):
        am.load(models.fresh("gpt2"), device="mps")


LAUNCHES = {"run": 1.2, "focus": 3.3, "updates": 3.2}
"""The maximum of launches, relative to transformers' own forward pass: a tenth more than measured on GPT-2."""
WAITS = {"run": 4, "focus": 9, "updates": 8}
"""The padding (twice), the mask, the checks; then the weights, the input (twice), the results, and types of tokens."""


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_launches_and_waits_are_few_and_the_checks_notice_what_they_notice_on_the_cpu(kind: str) -> None:
    (found,) = printed_by(HERE / "counts_on_device.py", kind)
    counts = found["counts"]
    assert counts["plain"]["launches"] > 300 and counts["plain"]["waits"] == 0
    for call, most in LAUNCHES.items():
        assert counts[call]["launches"] <= most * counts["plain"]["launches"], (call, counts)
        assert counts[call]["waits"] <= WAITS[call], (call, counts)
        assert counts[call]["checks"] == 1, (call, counts)
    before, changed, undone = found["hashes"]
    assert before == undone != changed
    for fault, sentence in (
        ("doubled_z", "layer 2, token 9 .*attn_raw = Σ_h z W_O"),
        ("changed_values", "layer 1, token 9 .*z = pattern v"),
        ("leaking_rows", "layer 0, token 0 .*a row of the pattern sums to 1"),
    ):
        on_cpu, on_device = found["errors"][fault]
        assert on_device == on_cpu
        assert re.search(sentence, on_device), on_device
