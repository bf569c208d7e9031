"""The rank correlation and Pearson's equal scipy's."""

import math

import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from attnmech.maths.ranks import plain_correlation, rank_correlation


def test_ranks_with_ties() -> None:
    x, y = torch.tensor([1.0, 2.0, 2.0, 5.0, 3.0]), torch.tensor([4.0, 4.0, 1.0, 0.0, 2.0])
    assert rank_correlation(x, y) == pytest.approx(float(spearmanr(x, y).statistic))
    assert plain_correlation(x, y) == pytest.approx(float(pearsonr(x, y).statistic))


def test_nothing_to_correlate() -> None:
    assert math.isnan(rank_correlation(torch.ones(5), torch.arange(5).float()))
    assert math.isnan(rank_correlation(torch.ones(1), torch.ones(1)))
