"""A model on one or two devices other than the CPU gives the same results as on the CPU: `fake_device.py`, in
processes.

Every model makes a few common calls and its share of the others, also on a device that refuses float64, like Apple's
MPS.
"""

import json
from pathlib import Path
from typing import Final

import pytest
from comparing import printed_by
from matrix import CALLS
from test_examples import example

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
    missing = set(CALLS).difference(OF_NONE, *shares("gpu", float64).values())
    assert missing == ({"global_attention"} if float64 == "none" else set())
