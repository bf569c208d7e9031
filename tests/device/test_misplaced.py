"""Tensors on a different device from the model's, and missing devices: `misplaced.py`, run in a separate process."""

from pathlib import Path

import models
import pytest
from comparing import printed_by

import attnmech as am

HERE = Path(__file__).parent
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
