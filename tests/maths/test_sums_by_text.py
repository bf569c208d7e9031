"""Sums and counts by text and class of row, against a loop."""

import pytest
import torch

from attnmech.maths import sums_by_text as sums_module
from attnmech.maths.sums_by_text import counts_by_text, sums_by_text

CLASSES = {
    "one text, all but the first": [[[1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]],
    "padding, special rows between, rows of no class": [
        [[0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0]],
        [[0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]],
    ],
}


@pytest.mark.parametrize("layers", [(), (2,)])
@pytest.mark.parametrize("valid_heads", [1, 5])
@pytest.mark.parametrize("at_once", [1, 2**18])
@pytest.mark.parametrize("name", CLASSES)
def test_against_a_loop(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], valid_heads: int, at_once: int, name: str
) -> None:
    monkeypatch.setattr(sums_module, "_AT_ONCE", at_once)
    classes = torch.tensor(CLASSES[name]).bool()
    texts, _, rows = classes.shape
    valid = torch.rand(4, *layers, valid_heads, texts, rows) > 0.3
    values = torch.randn(4, *layers, 5, texts, rows).masked_fill(~valid, 0.0)
    sums, counts = sums_by_text(values, classes), counts_by_text(valid, classes)
    assert sums.dtype == counts.dtype == torch.float64
    assert sums.shape == (4, 3, *layers, 5, texts) and counts.shape == (4, 3, *layers, valid_heads, texts)
    for kind in range(3):
        for text in range(texts):
            total, count = torch.zeros(4, *layers, 5).double(), torch.zeros(4, *layers, valid_heads).double()
            for row in range(rows):
                if classes[text, kind, row]:
                    total += values[..., text, row].double()
                    count += valid[..., text, row]
            torch.testing.assert_close(sums[:, kind, ..., text], total, rtol=1e-12, atol=1e-12)
            assert torch.equal(counts[:, kind, ..., text], count)
