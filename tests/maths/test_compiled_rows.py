"""The compiled loops give what torch gives, row by row."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from attnmech.maths import compiled
from attnmech.maths.compiled_rows import measured_softmax, summed_by_diagonal, summed_by_key
from attnmech.maths.softmax import Attention, softmax_with_sink

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def close_to(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-13


def scores_of(dtype: torch.dtype, keys: int = 301, rows: int = 5) -> Tensor:
    """Some with a wide spread, hidden cells, cells at −∞, a row that sees nothing, ties, and one key far above."""
    torch.manual_seed(keys)
    scores = torch.randn(2, 3, rows, keys, dtype=dtype) * torch.tensor([0.1, 3.0, 30.0], dtype=dtype)[:, None, None]
    lowest = torch.finfo(dtype).min
    scores[0, 0, 0, keys // 3 :] = lowest
    scores[0, 1, 1, ::2] = -torch.inf
    scores[0, 1, 1, -1] = 0.5
    scores[0, 2, 2] = lowest
    scores[1, 0, 3, [0, -1]] = 7.0
    scores[1, 1, 4, keys // 2] = 300.0
    return scores


@BOTH
@pytest.mark.parametrize("keys", [1, 2, 15, 128, 301, 2049, 5003])
@pytest.mark.parametrize("with_sink", [False, True])
def test_softmax_and_what_follows_from_it(dtype: torch.dtype, keys: int, with_sink: bool) -> None:
    scores, rows = scores_of(dtype, keys), range(40, 45)
    sink = torch.tensor([-2.0, 0.3, 9.0], dtype=dtype) if with_sink else None
    tokens = max(1, keys - 2)
    pattern, at_sink, found = measured_softmax(scores, sink, rows, torch.arange(tokens), torch.empty_like(scores))

    wide = None if sink is None else sink.double()
    wanted, mass = softmax_with_sink(scores.double(), wide)
    close = close_to(dtype)
    torch.testing.assert_close(pattern.double(), wanted, rtol=4 * close, atol=close)
    assert (at_sink is None) == (mass is None)
    if at_sink is not None and mass is not None:
        torch.testing.assert_close(at_sink.double(), mass, rtol=4 * close, atol=close)
    best = wanted.topk(min(2, keys), dim=-1).values
    assert torch.equal(pattern.gather(-1, found.key[..., None])[..., 0], found.first)
    assert torch.equal(found.first, pattern.amax(dim=-1))
    others = pattern.scatter(-1, found.key[..., None], -1.0).amax(dim=-1).clamp_min(0)
    assert torch.equal(found.second, others)
    torch.testing.assert_close(found.first.double(), best[..., 0], rtol=4 * close, atol=close)
    entropy = -torch.xlogy(wanted, wanted).sum(dim=-1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=4 * close, atol=8 * close)
    far = (torch.tensor(list(rows))[:, None] - torch.arange(tokens)).abs().double()
    distance = (wanted[..., :tokens] * far).sum(dim=-1)
    torch.testing.assert_close(found.distance.double(), distance, rtol=4 * close, atol=keys * close)


@BOTH
def test_hidden_keys_weigh_exactly_nothing(dtype: torch.dtype) -> None:
    scores = scores_of(dtype)
    pattern, _, _ = measured_softmax(scores, None, range(5), torch.arange(301), torch.empty_like(scores))
    hidden = (scores == torch.finfo(dtype).min) | (scores == -torch.inf)
    hidden[0, 2, 2] = False  # sees nothing: uniform, as in torch
    assert bool((pattern[hidden] == 0).all())
    torch.testing.assert_close(pattern[0, 2, 2], torch.full((301,), 1 / 301, dtype=dtype))


@BOTH
def test_the_highest_key_of_equal_ones_is_tied(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 1, 2, 700, dtype=dtype)
    scores[0, 0, 0, [300, 650]] = 5.0
    scores[0, 0, 1, 699] = 5.0
    pattern, _, found = measured_softmax(scores, None, range(2), torch.arange(700), torch.empty_like(scores))
    assert found.key.tolist() == [[[300, 699]]]
    top = Attention(pattern, scores, found).top
    assert (top.first == top.second).tolist() == [[[True, False]]]


@BOTH
@pytest.mark.parametrize("bad", [math.nan, -math.nan])
def test_nan_stays_nan(dtype: torch.dtype, bad: float) -> None:
    scores = scores_of(dtype)
    scores[1, 2, 1, 17] = bad
    pattern, _, found = measured_softmax(scores, None, range(5), torch.arange(301), torch.empty_like(scores))
    assert bool(pattern[1, 2, 1].isnan().all())
    assert bool(found.entropy[1, 2, 1].isnan())
    assert bool(pattern[1, 2, 0].isfinite().all())


@BOTH
def test_sums_by_class(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    pattern = torch.rand(2, 3, 5, 11, dtype=dtype)
    classes = torch.rand(2, 4, 5) > 0.4  # a row may be in several classes, or in none
    by_key, by_diagonal = torch.zeros(2, 3, 4, 11).double(), torch.zeros(2, 3, 4, 15).double()
    for text in range(2):
        for kind in range(4):
            for row in range(5):
                if classes[text, kind, row]:
                    by_key[text, :, kind] += pattern[text, :, row]
                    for key in range(11):
                        by_diagonal[text, :, kind, key - row + 4] += pattern[text, :, row, key]
    close = {"rtol": close_to(dtype), "atol": 0.0}
    torch.testing.assert_close(summed_by_key(pattern, classes).double(), by_key, **close)
    torch.testing.assert_close(summed_by_diagonal(pattern, classes).double(), by_diagonal, **close)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 7, 64, 300)
    everyone, at = torch.ones(2, 1, 64).bool(), torch.arange(300)
    wanted, _, measured = measured_softmax(scores, None, range(64), at, torch.empty_like(scores))
    sums = summed_by_key(scores, everyone)
    monkeypatch.setattr(compiled.torch, "get_num_threads", lambda: 3)

    def again(_: int) -> bool:
        pattern, _, found = measured_softmax(scores, None, range(64), at, torch.empty_like(scores))
        same = torch.equal(pattern, wanted) and torch.equal(found.entropy, measured.entropy)
        return same and torch.equal(summed_by_key(scores, everyone), sums)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(again, range(40)))


def test_what_is_not_taken() -> None:
    assert compiled.compiles(torch.zeros(3))
    assert not compiled.compiles(torch.zeros(3).half())
    assert not compiled.compiles(torch.zeros(3, requires_grad=True))
    assert not compiled.compiles(torch.zeros(3, device="meta"))


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "get_num_threads", lambda: 2)

    def work(start: int, stop: int) -> None:
        if start:
            raise ValueError("the second slice")

    with pytest.raises(ValueError, match="the second slice"):
        compiled.in_threads(4, 2**20, work)


def test_distances_to_keys_that_were_gathered() -> None:
    scores, at = torch.randn(2, 3, 4, 6), torch.tensor([0, 3, 7, 8, 9, 20])
    pattern, _, found = measured_softmax(scores, None, range(8, 12), at, torch.empty_like(scores))
    far = (torch.arange(8, 12)[:, None] - at).abs()
    torch.testing.assert_close(found.distance, (pattern * far).sum(dim=-1))
