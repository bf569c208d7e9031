"""The rule of null attention, case by case, and the numbers of a sink against loops."""

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmech.methods.null_attention.formulas import VERDICTS, most_attended, sink_mass, value_ratio, verdict_of

BOUNDS = {"delta": 0.1, "least_mass": 0.3, "least_ratio": 0.5}
NAN = float("nan")


@pytest.mark.core
@pytest.mark.parametrize(
    ("mass", "ratio", "low", "high", "verdict"),
    [
        (0.29, 0.1, NAN, NAN, "not attending"),
        (0.3, 0.1, -0.1, 0.1, "resting"),
        (0.9, 0.1, NAN, NAN, "undecided"),
        (0.9, NAN, -0.01, 0.01, "undecided"),
        (NAN, 0.1, -0.01, 0.01, "undecided"),
        (0.9, 0.5, 0.2, 0.3, "active"),
        (0.9, float("inf"), 0.2, 0.3, "active"),
    ],
)
def test_bounds_and_unknown_numbers(mass: float, ratio: float, low: float, high: float, verdict: str) -> None:
    assert verdict_of(mass, ratio, low, high, **BOUNDS) == verdict


@given(*(st.floats(-1, 2),) * 4)
def test_both_indicators_make_the_verdict(mass: float, ratio: float, one: float, two: float) -> None:
    low, high = sorted((one, two))
    verdict = verdict_of(mass, ratio, low, high, **BOUNDS)
    assert verdict in VERDICTS
    assert (verdict == "not attending") == (mass < 0.3)
    assert (verdict == "resting") == (mass >= 0.3 and ratio < 0.5 and max(-low, high) <= 0.1)
    assert (verdict == "active") == (mass >= 0.3 and ratio >= 0.5 and max(low, -high) > 0.1)
    assert (verdict == "unused") == (mass >= 0.3 and ratio >= 0.5 and max(-low, high) <= 0.1)
    assert (verdict == "subtle") == (mass >= 0.3 and ratio < 0.5 and max(low, -high) > 0.1)
    # The sign of the metric must not matter.
    assert verdict == verdict_of(mass, ratio, -high, -low, **BOUNDS)


@pytest.mark.core
def test_mass_and_ratio_equal_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    received, written = (torch.rand(2, 3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
    sink = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
    others = real & ~sink
    masses = sink_mass(received, sink[:, None], others[:, None])
    ratios = value_ratio(written, received, sink[:, None], others[:, None])
    for n, h in itertools.product(range(2), range(3)):
        at = [j for j in range(6) if sink[n, j]]
        rest = [j for j in range(6) if others[n, j]]
        got = sum(float(received[n, h, j]) for j in at)
        assert float(masses[n, h]) == pytest.approx(got / len(rest))
        wrote = sum(float(received[n, h, j] * written[n, h, j]) for j in at) / got
        assert float(ratios[n, h]) == pytest.approx(wrote / statistics.median(float(written[n, h, j]) for j in rest))


def test_a_sink_that_writes_nothing_has_the_ratio_zero_even_where_nobody_writes() -> None:
    sink = torch.tensor([[[True, False, False]]])
    received = torch.ones(1, 1, 3)
    silent = value_ratio(torch.tensor([[[0.0, 0.0, 0.0]]]), received, sink, ~sink)
    alone = value_ratio(torch.tensor([[[2.0, 0.0, 0.0]]]), received, sink, ~sink)
    assert (silent.item(), alone.item()) == (0.0, torch.inf)


def test_a_sink_that_nobody_attends_has_the_plain_mean_of_its_tokens() -> None:
    sink = torch.tensor([[[True, True, False, False]]])
    found = value_ratio(torch.tensor([[[1.0, 3.0, 4.0, 6.0]]]), torch.zeros(1, 1, 4), sink, ~sink)
    assert found.item() == pytest.approx(2 / 5)


def test_the_most_attended_key_is_never_padding() -> None:
    received = torch.tensor([[[9.0, 0.0, 0.0, 0.0], [0.0, 1.0, 3.0, 2.0]]])
    real = torch.tensor([[False, True, True, True]])
    assert most_attended(received, real).tolist() == [[1, 2]]
