"""Ranks, nearest rows and churn against loops over the whole vocabulary; rounding must not decide them."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from attnmech.methods.drift.formulas import SIMILARITIES, Scan, churn, directions, sum_over_pairs
from attnmech.methods.drift.verdicts import rank_agreement

BLOCKS = [7, 64, 1000]


def scanned(streams: Tensor, rows: Tensor, own: Tensor, k: int, similarity: str = "cosine", block: int = 64) -> "Scan":
    """A scan as in a run: products in the precision of the streams, everything else in float64."""
    mean = rows.double().mean(dim=0)
    ybar = streams.double().mean(dim=0)
    precise = directions(streams.double(), similarity, ybar)

    def rows_of(ids: Tensor) -> Tensor:
        return directions(rows.double()[ids], similarity, mean)

    scan = Scan(precise.to(streams.dtype), precise, own, k, rows_of)
    for start in range(0, len(rows), block):
        scan.add(start, directions(rows[start : start + block], similarity, mean.to(rows)))
    return scan


def naive(streams: Tensor, rows: Tensor, own: Tensor, k: int, similarity: str) -> list[tuple[int, list[int]]]:
    """The same row by row, with numpy in float64."""
    y, e = streams.double().numpy(), rows.double().numpy()
    if similarity == "centred cosine":
        y, e = y - y.mean(axis=0), e - e.mean(axis=0)
    found = []
    for number, token in enumerate(own.tolist()):
        similar = []
        for row in e:
            product = math.fsum(a * b for a, b in zip(y[number], row, strict=True))
            size = math.sqrt(math.fsum(y[number] ** 2)) * math.sqrt(math.fsum(row**2))
            similar.append(product if similarity == "dot" else product / size)
        order = sorted(range(len(e)), key=lambda each: (-similar[each], each))
        found.append((sum(each > similar[token] for each in similar), order[:k]))
    return found


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", BLOCKS)
def test_ranks_and_nearest_rows_are_those_of_a_loop(similarity: str, dtype: torch.dtype, block: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(173, 11, generator=generator, dtype=dtype) + 0.7
    own = torch.randint(0, 173, (13,), generator=generator)
    streams = 0.4 * rows[own] + torch.randn(13, 11, generator=generator, dtype=dtype)
    found = scanned(streams, rows, own, 9, similarity, block).finish()
    for number, (rank, nearest) in enumerate(naive(streams, rows, own, 9, similarity)):
        assert (int(found.rank[number]), found.nearest[number].tolist()) == (rank, nearest)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**32])
def test_the_own_row_at_any_positive_scale_has_rank_0(block: int, scale: float) -> None:
    """Also if other rows are exact copies of it, or differ by a single rounding in float32."""
    rows = torch.randn(300, 33, generator=torch.Generator().manual_seed(0)) + 2
    rows[[5, 120, 299]] = rows[40].clone()
    rows[77] = rows[40] * (1 + 1e-6)
    own = torch.tensor([40, 5, 7, 299])
    found = scanned(rows[own] * scale, rows, own, 6, block=block).finish()
    assert found.rank.tolist() == [0, 0, 0, 0]
    # Among equally similar rows, the lower id comes first for any blocks.
    exact = [int(each) for each in found.nearest[0] if int(each) != 77]
    assert exact[:4] == [5, 40, 120, 299]


def test_what_float32_cannot_tell_apart_is_decided_in_float64() -> None:
    """A row that is more similar by 1e-9 counts; a row that is less similar by 1e-9 does not."""
    own_row = torch.tensor([1.0, 0.0, 0.0])
    closer, farther = torch.tensor([1.0, 1.0e-4, 0.0]), torch.tensor([1.0, -1.0e-4, 0.0])
    rows = torch.stack((own_row, closer, farther, torch.tensor([0.0, 0.0, 1.0])))
    stream = torch.tensor([[1.0, 5.01e-5, 0.0], [1.0, 4.99e-5, 0.0]])
    exact = (directions(stream.double(), "cosine") @ directions(rows.double(), "cosine").T)[:, 1:2]
    own = torch.zeros(2, dtype=torch.long)
    found = scanned(stream, rows, own, 1).finish()
    assert found.rank.tolist() == [1, 0]
    assert found.nearest.tolist() == [[1], [0]]
    assert float((exact[0] - exact[1]).abs()) < 1e-8


def test_a_vocabulary_smaller_than_k_and_spare_rows() -> None:
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    found = scanned(rows[:3], rows, torch.arange(3), 12, block=5).finish()
    assert [sorted(each) for each in found.nearest.tolist()] == [list(range(12))] * 3


def test_churn_is_the_share_of_new_members() -> None:
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.stack([torch.randperm(30, generator=generator)[:8] for _ in range(6)]) for _ in range(2))
    expected = [1 - len(set(a) & set(b)) / 8 for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    assert churn(one, other).tolist() == pytest.approx(expected, abs=1e-15)
    assert churn(one, one.flip(-1)).tolist() == [0.0] * 6
    assert churn(one, one + 100).tolist() == [1.0] * 6


def test_cosines_of_all_pairs() -> None:
    unit = directions(torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), "cosine")
    pairs = sum(float(a @ b) for a, b in itertools.permutations(unit, 2))
    assert float(sum_over_pairs(unit)) == pytest.approx(pairs, abs=1e-12)


@pytest.mark.parametrize("count", [4, 6, 9])
def test_rank_agreement_is_spearmans_with_the_share_of_orders(count: int) -> None:
    generator = np.random.Generator(np.random.PCG64(count))
    one, other = generator.normal(size=count), generator.normal(size=count)
    other[1] = other[0]
    rho, p = rank_agreement(one, other)
    assert rho == pytest.approx(float(spearmanr(one, other).statistic), abs=1e-12)
    if count <= 6:
        all_of_them = [abs(spearmanr(order, other).statistic) for order in itertools.permutations(one)]
        assert p == pytest.approx(np.mean(np.array(all_of_them) >= abs(rho) - 1e-12))
    else:
        assert 0.0001 <= p <= 1


def test_rank_agreement_of_a_constant_or_unknown_series_is_nan() -> None:
    line = np.array([1.0, 2.0, 3.0, 5.0])
    assert all(math.isnan(each) for each in rank_agreement(line, np.ones(4)))
    assert all(math.isnan(each) for each in rank_agreement(line, np.array([1.0, np.nan, 3.0, 4.0])))
    assert all(math.isnan(each) for each in rank_agreement(line[:2], line[:2]))
    assert rank_agreement(line, line)[0] == pytest.approx(1.0)


def test_shuffled_orders_of_unrelated_series_give_uniform_shares() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    shares = [rank_agreement(generator.normal(size=6), generator.normal(size=6))[1] for _ in range(300)]
    assert 0.02 < float(np.mean(np.array(shares) <= 0.05)) < 0.08
