"""A row's two highest values against a sort, and its entropy against the definition in float64."""

import math

import pytest
import torch

from attnmech.maths.softmax import Attention, softmax_of, softmax_with_sink, top_two


@pytest.mark.parametrize("keys", [1, 2, 5, 31, 63, 64, 127, 128, 129, 161, 255, 256, 257, 319, 320, 321, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_highest_are_those_of_a_sort(keys: int, dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 40, keys, dtype=dtype, generator=torch.Generator().manual_seed(keys))
    ordered = values.sort(dim=-1, descending=True)
    found = top_two(values)
    assert torch.equal(found.first, ordered.values[..., 0])
    assert torch.equal(found.key, ordered.indices[..., 0])
    assert torch.equal(found.second, ordered.values[..., 1] if keys > 1 else torch.zeros_like(found.first))


@pytest.mark.parametrize("keys", [4, 130, 259, 321])
def test_wherever_the_highest_two_stand(keys: int) -> None:
    """Every pair of places, so that no column, window or remainder is missed."""
    rows = [(one, other) for one in range(keys) for other in range(0, keys, 7) if one != other]
    values = torch.zeros(len(rows), keys)
    for row, (one, other) in enumerate(rows):
        values[row, one], values[row, other] = 2.0, 1.0
    found = top_two(values)
    assert found.key.tolist() == [one for one, _ in rows]
    assert (found.first == 2).all() and (found.second == 1).all()


@pytest.mark.parametrize("keys", [4, 130, 259, 321])
def test_equal_highest_are_seen_as_equal(keys: int) -> None:
    rows = [(one, other) for one in range(0, keys, 3) for other in range(keys) if one != other]
    values = torch.zeros(len(rows), keys)
    for row, pair in enumerate(rows):
        values[row, list(pair)] = 1.0
    found = top_two(values)
    assert torch.equal(found.first, found.second)
    assert all(key in pair for key, pair in zip(found.key.tolist(), rows, strict=True))


def masked_scores(dtype: torch.dtype, spread: float) -> torch.Tensor:
    scores = spread * torch.randn(2, 3, 50, 90, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(50, 90, dtype=torch.bool).triu(41), torch.finfo(dtype).min)


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
def test_entropy_is_its_definition(dtype: torch.dtype, close: float, spread: float) -> None:
    scores = masked_scores(dtype, spread)
    exact = torch.softmax(scores.double(), dim=-1)
    expected = -torch.xlogy(exact, exact).sum(dim=-1)
    found = Attention(scores, softmax_of(scores)).entropy
    assert torch.allclose(found.double(), expected, rtol=close, atol=close)
    edited = Attention(scores, exact.to(dtype), edited=True).entropy
    assert torch.allclose(edited.double(), expected, rtol=close, atol=close)


def test_entropy_of_a_long_row_does_not_cancel() -> None:
    scores = torch.full((1, 1, 1, 8192), 100.0)
    assert float(Attention(scores, softmax_of(scores)).entropy) == pytest.approx(math.log(8192), abs=2e-6)


def test_a_sink_takes_its_part() -> None:
    scores, sink = masked_scores(torch.float64, 2.0), torch.tensor([0.3, -1.0, 5.0], dtype=torch.float64)
    whole = torch.cat((scores, sink[None, :, None, None].expand(2, 3, 50, 1)), dim=-1).exp()
    expected = whole[..., :-1] / whole.sum(dim=-1, keepdim=True)
    pattern, taken = softmax_with_sink(scores, sink)
    assert torch.allclose(taken, whole[..., -1] / whole.sum(dim=-1), atol=1e-14)
    found = Attention(scores, pattern)
    assert torch.allclose(found.pattern, expected, atol=1e-14)
    assert torch.allclose(found.entropy, -torch.xlogy(expected, expected).sum(dim=-1), atol=1e-13)


def test_a_row_without_keys_has_no_entropy_beside_a_sink() -> None:
    """Padding on the left: all keys are hidden, and the sink takes everything."""
    scores, sink = torch.full((1, 2, 1, 5), torch.finfo(torch.float32).min), torch.tensor([0.3, -1.0])
    found = Attention(scores, softmax_of(scores, sink))
    assert not found.pattern.any() and not found.entropy.any()
