"""Counts kernel launches and waits on a device; the checks notice the same faults as on the CPU."""

import re
from pathlib import Path

import pytest
from comparing import printed_by

HERE = Path(__file__).parent
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
