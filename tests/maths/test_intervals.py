"""Intervals of means over texts, one by one and all together, against loops and by simulation."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm, t
from torch import Tensor

from attnmech.maths.intervals import LEAST_TEXTS, TextMeans, resampled

RUNS = 400


def drawn(kind: str, quantities: int, texts: int, generator: np.random.Generator) -> Tensor:
    """Effects of mean 0 (of median 0, for "cauchy" and "skewed"), correlated 0.3 between heads.

    "rare steps" and "steps" are effects on an accuracy: 0 on most texts, 1 or −1 on the others.
    """
    if kind.endswith("steps"):
        changed = 0.1 if kind == "rare steps" else 0.3
        steps = generator.choice([0.0, 1.0, -1.0], (quantities, texts), p=[1 - 2 * changed, changed, changed])
        return torch.from_numpy(steps)
    shared, own = generator.normal(size=(1, texts)), generator.normal(size=(quantities, texts))
    normal = math.sqrt(0.3) * shared + math.sqrt(0.7) * own
    of_kind = {
        "normal": lambda: normal,
        "t3": lambda: t.ppf(norm.cdf(normal), 3),
        "cauchy": lambda: t.ppf(norm.cdf(normal), 1),
        "lognormal": lambda: np.exp(normal) - math.exp(0.5),
        "skewed": lambda: np.exp(1.5 * normal) - 1,
    }
    return torch.from_numpy(of_kind[kind]())


def two_errors(share: float, runs: int) -> float:
    """Two standard errors of a simulated share."""
    return 2 * math.sqrt(share * (1 - share) / runs)


def test_of_texts_of_one_length_it_is_the_t_interval() -> None:
    values = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = TextMeans.of_ratio(values * 7, torch.full((1, 8), 7.0)).interval(level=0.9)
    for row, column in enumerate(values.numpy()):
        wanted = t.interval(0.9, 7, loc=column.mean(), scale=column.std(ddof=1) / math.sqrt(8))
        assert (float(low[row]), float(high[row])) == pytest.approx(wanted, rel=1e-12)


def test_what_a_replicate_draws() -> None:
    counts = resampled(7, 4000)
    assert torch.equal(counts.sum(dim=0), torch.full((4000,), 7.0, dtype=torch.float64))
    assert float(counts.mean(dim=1).sub(1).abs().max()) < 0.05 and float(counts.var()) == pytest.approx(6 / 7, rel=0.05)
    assert torch.equal(resampled(7, 9)[:, :5], resampled(7, 5)) and not torch.equal(resampled(7, 5), resampled(7, 5, 1))


def test_the_largest_deviation_of_each_replicate() -> None:
    generator = torch.Generator().manual_seed(2)
    above = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    below = torch.randint(1, 20, (3, 8), generator=generator).double()
    for means in (TextMeans.of_values(above), TextMeans.of_ratio(above, below)):
        assert int(means.heavy.sum()) == 1
        for group, measured in zip((~means.heavy, means.heavy), means._largest, strict=True):
            sums, sizes = (side[group][:, means._order].tolist() for side in (means.above, means.below))
            largest = []
            for weights in resampled(8, 2000).T.tolist():
                deviations = []
                for y, n in zip(sums, sizes, strict=True):
                    whole = sum(y) / sum(n)
                    total = sum(w * size for w, size in zip(weights, n, strict=True))
                    mean = sum(w * value for w, value in zip(weights, y, strict=True)) / total
                    squares = sum(w * (a - mean * b) ** 2 for w, a, b in zip(weights, y, n, strict=True))
                    error = math.sqrt(8 / 7 * squares) / total
                    deviations.append(math.inf if max(weights) == 8 else abs(mean - whole) / error)
                largest.append(max(deviations))
            torch.testing.assert_close(measured, torch.tensor(sorted(largest), dtype=torch.float64))


def test_the_order_of_texts_does_not_matter() -> None:
    generator = np.random.default_rng(5)
    values = drawn("t3", 40, 12, generator)
    values[3:9] += 1.5
    values[11, 4] = math.nan
    for below in (torch.ones(40, 12), torch.from_numpy(generator.integers(3, 60, (40, 12))).double()):
        means = TextMeans.of_ratio(values * below, below)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        other = TextMeans.of_ratio((values * below)[:, order], below[:, order])
        for end, end_of_other in zip(means.simultaneous(), other.simultaneous(), strict=True):
            torch.testing.assert_close(end, end_of_other, rtol=1e-9, atol=1e-12)
        assert torch.equal(means.clear, other.clear) and torch.equal(means.clear_size, other.clear_size)


@pytest.mark.parametrize("quantities", [2, 17, 32])
def test_a_heavy_tail_widens_its_own_interval_alone(quantities: int) -> None:
    values = drawn("normal", quantities, 24, np.random.default_rng(quantities))
    plain = TextMeans.of_values(values)
    values[1] *= 0.01
    values[1, 20] = 7.0
    means = TextMeans.of_values(values)
    assert bool(means.heavy[1]) and int(means.heavy.sum()) == math.ceil(quantities / 16)
    low, high = means.simultaneous()
    wide = (high - low) / means.standard_error
    usual = (plain.simultaneous()[1] - plain.simultaneous()[0]) / plain.standard_error
    assert float(wide[0]) == pytest.approx(float(usual[0]), rel=0.1) and float(wide[1]) > 2 * float(usual[1])


def test_simultaneous_intervals_hold_those_of_each_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    below = torch.randint(1, 200, (1, 9), generator=generator).double()
    means = TextMeans.of_ratio(torch.randn(6, 9, generator=generator, dtype=torch.float64) * below, below)
    (low, high), (lower, higher) = means.interval(), means.simultaneous()
    assert bool((lower <= low).all()) and bool((high <= higher).all())
    assert float((means.simultaneous(0.5)[1] - lower).min()) > 0


@pytest.mark.parametrize(("texts", "certain"), [(5, False), (12, True)])
def test_the_same_on_every_text(texts: int, certain: bool) -> None:
    """Without spread there is no standard error; n equal signs have probability 2^(1 − n)."""
    values = torch.cat((torch.full((1, texts), 0.25), torch.zeros(1, texts), torch.randn(18, texts)))
    means = TextMeans.of_values(values)
    assert bool(means.clear[0]) is certain and not means.clear[1]
    low, high = means.simultaneous()
    assert (low[:2].tolist(), high[:2].tolist()) == (([0.25, 0.0],) * 2) if certain else bool(low[:2].isnan().all())


def test_what_is_the_same_on_nearly_all_texts_stands_apart() -> None:
    """Replicates without the one different text have no spread; the verdicts on the other heads ignore this head."""
    generator = np.random.default_rng(6)
    values = drawn("normal", 32, 24, generator)
    values[7] += 3.0
    plain = TextMeans.of_values(values)
    values = torch.cat((values, torch.zeros(1, 24), torch.full((1, 24), -1.0)))
    values[32, 5], values[33, 9] = 0.4, 0.0
    lengths = torch.from_numpy(generator.integers(4, 90, (1, 24))).double()
    for means in (TextMeans.of_values(values), TextMeans.of_ratio(values * lengths, lengths)):
        assert means.tied.nonzero()[:, 0].tolist() == [32, 33]
        assert means.clear[7] and means.clear[33] and not means.clear[32]
    found = TextMeans.of_values(values)
    for end, wanted in zip(found.simultaneous(), plain.simultaneous(), strict=True):
        torch.testing.assert_close(end[:32], wanted, rtol=0.02, atol=0.02)
    wanted = t.interval(1 - 0.05 / 34, 23, loc=0.4 / 24, scale=float(values[32].std()) / math.sqrt(24))
    assert tuple(float(end[32]) for end in found.simultaneous()) == pytest.approx(wanted)


def test_how_many_texts_would_do() -> None:
    values = torch.randn(32, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[3] = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, -0.5, 2.0, 1.0, -1.0, 2.0, 0.0, 1.0])  # above 0 on 9 of 11
    needed = TextMeans.of_values(values).texts_needed((3,))
    wanted = next(n for n in range(5, 100) if binomtest(round(n * 9 / 11), n).pvalue <= 0.05 / 32)
    assert needed == wanted
    values[3] = torch.cat((torch.full((7,), -0.1), torch.full((5,), 9.0)))
    assert TextMeans.of_values(values).texts_needed((3,)) is None  # the mean is above 0, but most texts are below
    assert TextMeans.of_values(torch.zeros(2, 6)).texts_needed((0,)) is None
    assert TextMeans.of_values(torch.rand(32, 6) + 0.1).texts_needed((0,)) == 11  # 2^(1 − 11) ≤ 0.05 / 32


def test_direction_counts_texts_and_leaves_ties_out() -> None:
    values = torch.zeros(3, 14)
    values[0, :11] = 1.0  # 11 of 11, three ties
    values[1, :10], values[1, 10] = 1.0, -90.0  # 10 of 11, and a mean below 0
    values[2, :7], values[2, 7:] = 1.0, -1.0
    means = TextMeans.of_values(values)
    assert means.direction.tolist() == [1, 1, 0]
    assert means.clear.tolist() == [True, False, False] and means.agreeing.tolist() == [11, 1, 0]
    assert means.ties.tolist() == [3, 3, 0]
    assert means.one_text.tolist() == [False, True, False] and not means.clear_size[1]


@pytest.mark.parametrize("spread", [0.0, 0.35, 1.0], ids=["one length", "factor of two", "factor of ten"])
@pytest.mark.parametrize("texts", [5, 10, 20, 50])
def test_intervals_cover_means_of_normal_effects(texts: int, spread: float) -> None:
    generator, shape = np.random.default_rng(texts), (20_000, texts)
    n = np.exp(generator.normal(0, spread, shape))
    y = n * generator.normal(size=shape)
    low, high = TextMeans.of_ratio(torch.from_numpy(y), torch.from_numpy(n)).interval()
    assert float(((low <= 0) & (high >= 0)).double().mean()) >= 0.94


@pytest.mark.parametrize(
    ("claim", "kind", "texts"),
    [
        ("clear", "rare steps", 5), ("clear", "rare steps", 20), ("clear", "steps", 10), ("clear", "steps", 50),
        ("direction", "normal", 5), ("direction", "skewed", 5), ("direction", "cauchy", 12),
        ("direction", "skewed", 20), ("direction", "t3", 50), ("clear_size", "lognormal", 5),
        ("clear_size", "t3", 10), ("clear_size", "normal", 20), ("clear_size", "lognormal of 1024 heads", 20),
    ],
)  # fmt: skip
def test_false_claims_among_many_heads(claim: str, kind: str, texts: int) -> None:
    generator, (kind, _, many) = np.random.default_rng(texts), kind.partition(" of ")
    quantities, runs = (1024, 40) if many else (32, RUNS)
    draws = (TextMeans.of_values(drawn(kind, quantities, texts, generator)) for _ in range(runs))
    assert np.mean([bool(getattr(means, claim).any()) for means in draws]) <= 0.05 + two_errors(0.05, runs)


def test_an_effect_of_one_standard_deviation_on_forty_texts_is_found() -> None:
    """Next to a head whose effect comes from one text; by the binomial, 0.91 have a clear direction."""
    generator, found, sized = np.random.default_rng(3), 0, 0
    for _ in range(RUNS):
        values = drawn("normal", 32, 40, generator)
        values[17] += 1.0
        values[4] *= 0.01
        values[4, generator.integers(40)] = 20.0
        means = TextMeans.of_values(values)
        found += bool(means.clear[17])
        sized += bool(means.clear_size[17])
    assert found / RUNS >= 0.9 - two_errors(0.1, RUNS) and sized / RUNS >= 0.9


def test_one_quantity_without_an_axis_of_its_own() -> None:
    """A claim about one set of heads has one effect; its intervals and tests are those of a list of one."""
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    for texts in range(1, 10):
        alone, listed = (TextMeans.of_values(each) for each in (values[:texts], values[None, :texts]))
        ends = zip(
            (*alone.simultaneous(), *alone.interval()), (*listed.simultaneous(), *listed.interval()), strict=True
        )
        for one, other in ends:
            assert one.shape == () and (float(one) == float(other[0]) or texts < LEAST_TEXTS)
            assert bool(one.isnan()) is (texts < LEAST_TEXTS)
        assert (bool(alone.clear), bool(alone.clear_size)) == (bool(listed.clear[0]), bool(listed.clear_size[0]))
