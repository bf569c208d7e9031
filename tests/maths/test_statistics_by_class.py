"""Statistics of where rows attend, and their sums by class of row."""

import pytest
import torch

from attnmech.maths.focus import STATISTICS, DefinedRows, RowMeasures, row_statistics, statistics_by_class

HEADS, TEXTS, ROWS = 3, 2, 11


def measures(dtype: torch.dtype) -> RowMeasures:
    """Rows whose highest key is their own token, the first, the previous, another, or tied."""
    shape = TEXTS, HEADS, ROWS
    key = torch.randint(0, ROWS, shape)
    key[0, 0], key[0, 1], key[1, 0] = torch.arange(ROWS), 0, torch.arange(ROWS) - 1
    first, entropy, distance = (torch.rand(shape, dtype=dtype) for _ in range(3))
    second = torch.where(torch.rand(shape) > 0.6, first, first / 3)
    return RowMeasures(key, first, second, entropy, distance, torch.rand(4, *shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_by_class_against_sums_row_by_row(dtype: torch.dtype) -> None:
    given = measures(dtype)
    valid = torch.rand(len(STATISTICS), TEXTS, ROWS) > 0.2
    defined = DefinedRows(torch.tensor([0, 2]), torch.randint(0, ROWS, (TEXTS, ROWS)), valid)
    kinds = torch.randint(0, 4, (TEXTS, ROWS))
    classes = torch.stack([kinds == kind for kind in range(3)], dim=1)
    classes[:, 1] = False
    values, sums = statistics_by_class(given, defined, classes)
    assert torch.equal(values, row_statistics(given, defined).transpose(1, 2))
    assert values.shape == (len(STATISTICS), HEADS, TEXTS, ROWS) and values.dtype == dtype
    assert sums.shape == (len(STATISTICS), 3, HEADS, TEXTS) and sums.dtype == torch.float64
    for place, name in enumerate(STATISTICS):
        assert bool(values[place].any()), name
    for text in range(TEXTS):
        for kind in range(3):
            expected = sum(values[..., text, row].double() for row in range(ROWS) if classes[text, kind, row])
            expected = torch.zeros(len(STATISTICS), HEADS).double() if isinstance(expected, int) else expected
            torch.testing.assert_close(sums[:, kind, :, text], expected, rtol=1e-12, atol=1e-12)
