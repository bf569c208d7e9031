"""Correlations of distance and dot product against written-out formulas."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from attnmech.methods.joint_embedding.distances import (
    PairDistances,
    criterion,
    row_rank_correlation,
    weighted_correlation,
)
from attnmech.methods.joint_embedding.formulas import ScaleAndShift, Sphere, scale_grid, scale_of_norms, spread_ratio


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("percentile", [5.0, 20.0, 50.0])
def test_weighted_correlation_in_a_loop(percentile: float) -> None:
    distance, product = drawn(300).abs(), drawn(300, seed=1)
    product = product - distance
    tau = sorted(distance.tolist())
    at = percentile / 100 * 299
    limit = tau[math.floor(at)] + (at - math.floor(at)) * (tau[math.floor(at) + 1] - tau[math.floor(at)])
    near = [(d, p, (limit - d) ** 2) for d, p in zip(distance.tolist(), product.tolist(), strict=True) if d < limit]
    whole = sum(w for _, _, w in near)
    x, y = (sum(w * each[kind] for each in near for w in [each[2]]) / whole for kind in (0, 1))
    cov = sum(w * (d - x) * (p - y) for d, p, w in near)
    var = sum(w * (d - x) ** 2 for d, _, w in near), sum(w * (p - y) ** 2 for _, p, w in near)
    found = weighted_correlation(distance, product, percentile)
    assert found == pytest.approx(cov / math.sqrt(var[0] * var[1]), abs=1e-12)
    assert weighted_correlation(3 * distance, 7 * product - 2, percentile) == pytest.approx(found, abs=1e-9)


def test_nothing_to_correlate() -> None:
    assert math.isnan(weighted_correlation(torch.ones(50), drawn(50)))
    assert math.isnan(weighted_correlation(drawn(50).abs(), torch.ones(50)))
    assert math.isnan(weighted_correlation(torch.zeros(0), torch.zeros(0)))


def test_the_worst_row() -> None:
    distance, product = drawn(60).abs(), drawn(60, seed=1)
    row = torch.arange(4).repeat_interleave(15)
    each = [float(spearmanr(distance[row == n], product[row == n]).statistic) for n in range(4)]
    assert row_rank_correlation(distance, product, row) == pytest.approx(max(each))
    assert math.isnan(row_rank_correlation(distance[:2], product[:2], row[:2]))


@pytest.mark.parametrize("shift", [True, False])
def test_distances_by_squares_are_distances(shift: bool) -> None:
    q, k = drawn(4, 7) + 2, drawn(4, 7, seed=1) - 1
    one, other = (q - q.mean(0), k - k.mean(0)) if shift else (q, k)
    made = PairDistances(one.square().sum(1), other.square().sum(1), (one * other).sum(1))
    for c in (0.3, 1.0, 5.0):
        embedding = ScaleAndShift.of(q, k, c, shift=shift)
        expected = (embedding.queries(q) - embedding.keys(k)).norm(dim=1)
        assert made.at(c).numpy() == pytest.approx(expected.numpy(), abs=1e-12)


def test_the_order_of_scale_and_shift_matters() -> None:
    q, k = drawn(5, 3) + 1, drawn(6, 3, seed=1)
    right = ScaleAndShift.of(q, k, 2.0, shift=True).keys(k)
    assert right.mean(0).numpy() == pytest.approx((2 * q).mean(0).numpy())
    wrong = (k - k.mean(0) + q.mean(0)) / 2
    assert not torch.allclose(right, wrong)


def test_the_plain_criterion_would_run_away_and_the_weighted_one_has_a_minimum() -> None:
    q, k = drawn(40, 6), 3 * drawn(40, 6, seed=1)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(40))
    products = (q @ k.T).flatten()
    made = PairDistances(q.square().sum(1)[pairs[:, 0]], k.square().sum(1)[pairs[:, 1]], products)
    per_query = [
        np.mean([np.corrcoef(made.at(c).view(40, 40)[i], products.view(40, 40)[i])[0, 1] for i in range(40)])
        for c in (1.0, 10.0, 1e3)
    ]
    assert per_query[0] > per_query[1] > per_query[2] and per_query[2] < -0.999
    curve = criterion(made, products, scale_grid(scale_of_norms(q, k)))
    assert 0 < int(curve.argmin()) < 24


def test_c_follows_the_lengths() -> None:
    q, k = drawn(9, 4), drawn(11, 4, seed=1)
    assert scale_of_norms(5 * q, k) == pytest.approx(scale_of_norms(q, k) / math.sqrt(5))
    assert scale_of_norms(0 * q, k) == 1.0


def test_the_sphere_is_exact() -> None:
    q, k, p = drawn(5, 4), 10 * drawn(8, 4, seed=1), torch.arange(8, dtype=torch.float64)
    sphere = Sphere.of(k, p, 0.37, -0.2)
    queries, keys = sphere.queries(q), sphere.keys(k, p)
    scores = 0.37 * q @ k.T - 0.2 * p
    assert (queries @ keys.T).numpy() == pytest.approx(scores.numpy(), abs=1e-12)
    assert keys.norm(dim=1).numpy() == pytest.approx(np.full(8, math.sqrt(sphere.radius_squared)))
    squared = torch.cdist(queries, keys) ** 2
    constant = squared + 2 * scores
    assert constant.numpy() == pytest.approx(constant[:, :1].expand(-1, 8).numpy())
    assert bool((keys[:, -1] >= 0).all()) and float(keys[:, -1].min()) == pytest.approx(0, abs=1e-6)


def test_spread_ratio_of_points_and_of_one_point() -> None:
    points = drawn(20, 3)
    assert spread_ratio(points, points) == pytest.approx(1)
    assert spread_ratio(points[:1].expand(5, -1), points) == 0.0
    assert math.isnan(spread_ratio(points[:1], points))
