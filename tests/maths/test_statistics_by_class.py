"""The statistics of where rows look, in one loop and in torch's operations, and their sums by class of row."""

import pytest
import torch

from attnmech.maths import focus as module
from attnmech.maths.focus import STATISTICS, DefinedRows, RowMeasures, row_statistics, statistics_by_class

HEADS, TEXTS, ROWS = 3, 2, 11


def measures(dtype: torch.dtype) -> RowMeasures:
    """Rows whose highest key is their own, the first, the one before, another, or one of several."""
    shape = TEXTS, HEADS, ROWS
    key = torch.randint(0, ROWS, shape)
    key[0, 0], key[0, 1], key[1, 0] = torch.arange(ROWS), 0, torch.arange(ROWS) - 1
    first, entropy, distance = (torch.rand(shape, dtype=dtype) for _ in range(3))
    second = torch.where(torch.rand(shape) > 0.6, first, first / 3)
    return RowMeasures(key, first, second, entropy, distance, torch.rand(4, *shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loop_is_as_exact_as_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    given = measures(dtype)
    valid = torch.rand(len(STATISTICS), TEXTS, ROWS) > 0.2
    defined = DefinedRows(torch.tensor([0, 2]), torch.randint(0, ROWS, (TEXTS, ROWS)), valid)
    kinds = torch.randint(0, 4, (TEXTS, ROWS))
    classes = torch.stack([kinds == kind for kind in range(3)], dim=1)
    classes[:, 1] = False
    values, sums = statistics_by_class(given, defined, classes)
    monkeypatch.setattr(module, "compiles", lambda _: False)
    of_torch, sums_of_torch = statistics_by_class(given, defined, classes)
    assert torch.equal(of_torch, row_statistics(given, defined).transpose(1, 2))
    assert values.shape == (len(STATISTICS), HEADS, TEXTS, ROWS) and values.dtype == dtype
    assert sums.shape == (len(STATISTICS), 3, HEADS, TEXTS) and sums.dtype == torch.float64
    for place, name in enumerate(STATISTICS):
        close = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(values[place], of_torch[place], rtol=close, atol=0, msg=name)
        assert bool(values[place].any()), name
    torch.testing.assert_close(sums, sums_of_torch, rtol=1e-6, atol=1e-6)
    for text in range(TEXTS):
        for kind in range(3):
            expected = sum(values[..., text, row].double() for row in range(ROWS) if classes[text, kind, row])
            expected = torch.zeros(len(STATISTICS), HEADS).double() if isinstance(expected, int) else expected
            torch.testing.assert_close(sums[:, kind, :, text], expected, rtol=1e-12, atol=1e-12)
