"""Statistics of what a head writes in each row, against the formulas row by row."""

import math
from dataclasses import replace

import pytest
import torch

from attnmech.maths.update_statistics import STATISTICS, AgainstStream, LayerRows, update_statistics

HEADS, TEXTS, ROWS, KEYS = 3, 2, 7, 9


def against(places: int, dtype: torch.dtype) -> AgainstStream:
    """Norms of heads and streams at some tokens; one head writes nothing at one token, and one stream is zero."""
    norm, stream = torch.rand(TEXTS, HEADS, places, dtype=dtype) + 0.1, torch.rand(TEXTS, places, dtype=dtype) + 0.1
    norm[1, 2, 4], stream[0, 2], stream[1, 5] = 0, 0, 0
    product = (2 * torch.rand(TEXTS, HEADS, places, dtype=dtype) - 1) * norm * stream[:, None]
    return AgainstStream(norm, product, stream)


def rows_of(dtype: torch.dtype, *, aligned: bool) -> LayerRows:
    key = torch.randint(-1, ROWS, (TEXTS, HEADS, ROWS))
    key[0, 0], key[:, 1] = torch.arange(ROWS), 1
    # A key after the tokens that is not a token, as in some modules.
    key[1, 0, ::3] = KEYS
    real = torch.rand(TEXTS, ROWS) > 0.2
    return LayerRows(key, real, torch.tensor([0, 1]), torch.rand(TEXTS, ROWS, dtype=dtype) + 0.5, aligned)


def of_one_row(
    written: AgainstStream, read: AgainstStream, rows: LayerRows, at: tuple[int, int, int]
) -> dict[str, float]:
    """The statistics that are defined on one row."""
    text, head, row = at
    x, key = written.stream[text, row].item(), int(rows.key[at])
    if not rows.real[text, row] or x == 0:
        return {}
    factor = rows.by_token[text, row].item()
    size, product = written.norm[at].item() * factor, written.product[at].item() * factor
    m, cosine = size / x, product / (size * x) if size else 0.0
    found = {"magnitude": m, "along": m * cosine, "across": m * math.sqrt(1 - cosine**2)}
    if size:
        found["orientation"] = cosine
    if key < 0:
        return found
    place = "at_self" if rows.aligned and key == row else "at_first" if key == rows.begins[text] else "elsewhere"
    found[f"magnitude_{place}"] = m
    if key == KEYS:
        return found
    y, of_value = read.stream[text, key].item(), read.norm[text, head, key].item()
    if y:
        found["target_magnitude"] = of_value * factor / y
    if y and of_value:
        found["target_orientation"] = read.product[text, head, key].item() / (of_value * y)
    return found


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_statistic_of_every_row(dtype: torch.dtype, aligned: bool) -> None:
    rows = rows_of(dtype, aligned=aligned)
    written, read = against(ROWS, dtype), against(ROWS if aligned else KEYS, dtype)
    values, valid = update_statistics(written, [read], rows)
    assert values.shape == valid.shape == (len(STATISTICS), HEADS, TEXTS, ROWS) and values.dtype == dtype
    assert valid.any(dim=(1, 2, 3)).all() or not aligned
    for text in range(TEXTS):
        for head in range(HEADS):
            for row in range(ROWS):
                expected = of_one_row(written, read, rows, (text, head, row))
                for place, name in enumerate(STATISTICS):
                    value = values[place, head, text, row].item()
                    assert bool(valid[place, head, text, row]) is (name in expected), name
                    close = 1e-12 if dtype == torch.float64 else 2e-6
                    assert value == pytest.approx(expected.get(name, 0.0), rel=close, abs=close), name


def test_rows_of_global_tokens_have_values_of_their_own() -> None:
    written, read, of_global = (against(ROWS, torch.float64) for _ in range(3))
    rows = rows_of(torch.float64, aligned=True)
    by_global = torch.rand(TEXTS, ROWS) > 0.5
    found = update_statistics(written, [read, of_global], replace(rows, by_global=by_global))
    one, other = (update_statistics(written, [each], rows) for each in (read, of_global))
    for mine, local, globally in zip(found, one, other, strict=True):
        assert torch.equal(mine, torch.where(by_global, globally, local))
