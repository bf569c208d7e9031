"""The sampled tokens and pairs against loops, their correlations against written-out formulas, and threads."""

import math
import threading
from collections.abc import Iterator

import models
import pytest
import torch
from models import hooked
from scipy.stats import spearmanr

from attnmech.methods.joint_embedding import token_pairs
from attnmech.methods.joint_embedding.formulas import row_rank_correlation, spread_ratio, weighted_correlation
from attnmech.methods.joint_embedding.sums import in_threads
from attnmech.methods.joint_embedding.token_pairs import Pairs, Tokens, sampled, visible_pairs


def mask_of(name: str, given: object) -> tuple[object, object]:
    """A batch and the mask of its first layer."""
    model, found = hooked(name), []
    batch = model.encode(given)
    model.forward(batch, rows=[lambda block: found.append(block.mask)])
    return batch, found[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bloom", "bert", "mistral"])
def test_the_pairs_are_those_that_a_loop_finds(name: str, side: str) -> None:
    batch, mask = mask_of(name, models.padded(name, side))
    tokens = Tokens.of(batch)
    visible = mask.visible(range(7))
    expected = [
        (n, m)
        for n in range(len(tokens))
        for m in range(len(tokens))
        if tokens.text[n] == tokens.text[m] and visible[tokens.text[n], 0, tokens.position[n], tokens.position[m]]
    ]
    pairs = visible_pairs(tokens, mask, seed=0)
    assert pairs.whole and list(zip(pairs.query.tolist(), pairs.key.tolist(), strict=True)) == expected
    chosen = visible_pairs(tokens.chosen(torch.tensor([0, 2, 3, 9, 14])), mask, seed=0)
    inside = [(a, b) for a, b in expected if a in (0, 2, 3, 9, 14) and b in (0, 2, 3, 9, 14)]
    order = {place: n for n, place in enumerate((0, 2, 3, 9, 14))}
    assert list(zip(chosen.query.tolist(), chosen.key.tolist(), strict=True)) == [
        (order[a], order[b]) for a, b in inside
    ]


@pytest.mark.parametrize("cells", [10**6, 50])
def test_products_are_dot_products(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pairs, "CELLS", cells)
    batch, mask = mask_of("bloom", models.padded("bloom"))
    pairs: Pairs = visible_pairs(Tokens.of(batch), mask, seed=0)
    assert pairs.whole == (cells > 50) and len(pairs) > 5
    q, k = (torch.randn(15, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (0, 1))
    expected = [float(q[i] @ k[j]) for i, j in zip(pairs.query.tolist(), pairs.key.tolist(), strict=True)]
    assert pairs.products(q, k).tolist() == pytest.approx(expected)


def test_a_token_is_drawn_by_its_text_and_place_alone() -> None:
    batch, _ = mask_of("gpt2", models.padded("gpt2"))
    tokens, documents = Tokens.of(batch), torch.tensor([4, 9, 2])
    found = sampled(tokens, documents, 6, seed=1)
    assert len(found) == 6 and found.tolist() == sorted(set(found.tolist()))
    cells = {(int(documents[tokens.text[n]]), int(tokens.position[n])) for n in found.tolist()}
    other_order = torch.tensor([2, 0, 1])
    moved = Tokens.of(batch.texts(other_order))
    again = sampled(moved, documents[other_order], 6, seed=1)
    assert cells == {(int(documents[other_order][moved.text[n]]), int(moved.position[n])) for n in again.tolist()}
    assert sampled(tokens, documents, 100, seed=1).tolist() == list(range(15))


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


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_have_none_of_their_own_and_leave_none_changed() -> None:
    inside = in_threads(lambda number: (number, torch.get_num_threads()), 6)
    assert inside == [(number, 1) for number in range(6)] and torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 // number, 3)
    assert torch.get_num_threads() == 2
