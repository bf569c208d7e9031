"""Correlations of distance and dot product against written-out formulas."""

import math

import pytest
import torch
from scipy.stats import spearmanr

from attnmech.methods.joint_embedding.distances import (
    row_rank_correlation,
    weighted_correlation,
)
from attnmech.methods.joint_embedding.formulas import spread_ratio


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_spread_ratio_of_points_and_of_one_point() -> None:
    points = drawn(20, 3)
    assert spread_ratio(points, points) == pytest.approx(1)
    assert spread_ratio(points[:1].expand(5, -1), points) == 0.0
    assert math.isnan(spread_ratio(points[:1], points))
