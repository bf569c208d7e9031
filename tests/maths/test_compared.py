"""Statistics of a block's addition relative to the stream, against sums over dimensions."""

import math

import pytest
import torch

from attnmech.maths.updates import compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 70, 2049), (3, 1, 4100)])
def test_norms_and_products_of_each_token(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    update, constant = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    # The stream's tokens are not contiguous in memory.
    stream = torch.randn(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)
    by_token = torch.rand(shape[:2], dtype=dtype)
    found, plain = compared(update, stream, constant, by_token), compared(update, stream)
    one = compared(update, stream, constant)
    close = 1e-12 if dtype == torch.float64 else 3e-6
    for text in range(shape[0]):
        for token in range(shape[1]):
            u, x = update[text, token].tolist(), stream[text, token].tolist()
            c, b = constant.tolist(), by_token[text, token].item()
            at, size = (text, token), math.hypot(*u) * math.hypot(*x)
            assert found.norm[at].item() == pytest.approx(math.hypot(*u), rel=close)
            assert found.stream[at].item() == pytest.approx(math.hypot(*x), rel=close)
            assert found.product[at].item() == pytest.approx(sum(map(float.__mul__, u, x)), abs=close * size)
            rest = [mine - b * of_all for mine, of_all in zip(u, c, strict=True)]
            assert found.rest[at].item() == pytest.approx(math.hypot(*rest), rel=close)
            rest = [mine - of_all for mine, of_all in zip(u, c, strict=True)]
            assert one.rest[at].item() == pytest.approx(math.hypot(*rest), rel=close)
    assert torch.equal(plain.rest, plain.norm) and torch.equal(plain.norm, found.norm)


def test_what_is_not_finite_stays_so() -> None:
    update = torch.tensor([[[1.0, math.nan], [math.inf, 0.0], [0.0, 0.0]]])
    found = compared(update, torch.ones(1, 3, 2))
    assert math.isnan(found.norm[0, 0]) and found.norm[0, 1:].tolist() == [math.inf, 0.0]
    assert found.product[0, 1:].tolist() == [math.inf, 0.0]
