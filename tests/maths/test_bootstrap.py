"""The weights are Poisson(1) and belong to documents; the intervals cover what they should."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmech.maths.bootstrap import interval, poisson_weights


def test_weights_are_poisson_of_mean_one() -> None:
    weights = poisson_weights(torch.arange(400), 500, seed=3)
    assert weights.shape == (400, 500) and weights.dtype == torch.float64
    n = weights.numel()
    for k in range(7):
        p = math.exp(-1) / math.factorial(k)
        assert abs(float((weights == k).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert abs(float(weights.mean()) - 1) < 4 / math.sqrt(n)
    assert abs(float(weights.var()) - 1) < 4 * math.sqrt(3 / n)  # a fourth central moment of 4


def test_weights_of_documents_replicates_and_seeds_are_independent() -> None:
    weights = poisson_weights(torch.arange(300), 200)
    for pairs in (weights[:-1] * weights[1:], weights[:, :-1] * weights[:, 1:]):
        assert abs(float(pairs.mean()) - 1) < 4 * math.sqrt(5 / pairs.numel())
    other = weights * poisson_weights(torch.arange(300), 200, seed=1)
    assert abs(float(other.mean()) - 1) < 4 * math.sqrt(3 / other.numel())


@given(st.permutations(range(11)), st.integers(1, 10), st.integers(1, 9), st.integers(0, 2**63 - 1))
def test_a_weight_follows_from_seed_document_and_replicate_alone(
    order: list[int], cut: int, replicates: int, seed: int
) -> None:
    whole = poisson_weights(torch.arange(11), 12, seed)
    shards = [poisson_weights(torch.tensor(part), replicates, seed) for part in (order[:cut], order[cut:])]
    assert torch.equal(torch.cat(shards), whole[order, :replicates])


def test_weights_never_change() -> None:
    # Journals and shards of other machines hold sums made with these.
    assert poisson_weights(torch.tensor([7, 4, 7]), 6).tolist() == [
        [1, 2, 0, 1, 3, 2], [1, 1, 1, 1, 0, 0], [1, 2, 0, 1, 3, 2],
    ]  # fmt: skip
    assert poisson_weights(torch.tensor([10**12]), 5, seed=9).tolist() != poisson_weights(
        torch.tensor([10**12 + 1]), 5, seed=9
    ).tolist()  # fmt: skip
    assert poisson_weights(torch.tensor([], dtype=torch.long), 5).shape == (0, 5)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    documents, replicates, trials = 60, 400, 300
    weights = poisson_weights(torch.arange(documents), replicates)
    values = torch.randn(trials, documents, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3 + 5
    means = values @ weights / weights.sum(dim=0)
    for level, z in ((0.95, 1.96), (0.8, 1.2816)):
        low, high = interval(means, level)
        assert low.shape == (trials,)
        closed_form = 2 * z * values.std(dim=1) / math.sqrt(documents)
        assert abs(float(((high - low) / closed_form).mean()) - 1) < 0.05
        covered = float(((low <= 5) & (high >= 5)).double().mean())
        # Two standard errors of a share over 300 trials, and what the percentile interval lacks at 60 documents.
        assert level - 0.05 < covered < level + 0.045


def test_the_interval_is_numpys_percentile_without_the_rest() -> None:
    generator = np.random.default_rng(4)
    estimates = generator.normal(size=(3, 5, 41))
    estimates[generator.random(estimates.shape) < 0.3] = np.nan
    estimates[1, 2, 3:7] = np.inf
    estimates[0, 1] = np.nan
    estimates[0, 2] = np.nan
    estimates[0, 2, 17] = 0.25
    estimates[0, 3] = np.nan
    estimates[0, 3, [4, 30]] = [2.0, -1.0]
    low, high = interval(torch.from_numpy(estimates), 0.9)
    assert low.shape == high.shape == (3, 5)
    for place in np.ndindex(3, 5):
        left = estimates[place][np.isfinite(estimates[place])]
        expected = np.quantile(left, [0.05, 0.95]) if len(left) > 1 else [np.nan, np.nan]
        found = [float(low[place]), float(high[place])]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert low[0, 1].isnan() and high[0, 2].isnan() and not low[0, 3].isnan()


def test_an_interval_without_axes_and_of_single_precision() -> None:
    low, high = interval(torch.tensor([4.0, 1.0, 3.0, 2.0, 5.0]), 0.5)
    assert (float(low), float(high)) == (2.0, 4.0)
    assert low.dtype == torch.float32 and low.shape == ()
