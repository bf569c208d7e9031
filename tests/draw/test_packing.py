"""Arrays packed in 16 bits are restored within the stated error."""

import re

import numpy as np
import pytest
from unpacking import unpacked

from attnmech.draw import packing
from attnmech.draw.packing import (
    pack_keys,
    pack_logarithms,
    pack_probabilities,
    pack_values,
    rounding_error,
    rounding_note,
)
from attnmech.errors import InputError


def test_values_come_back_within_the_stated_error() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5, 7)) * np.array([1, 10, 1000]).reshape(1, 3, 1, 1)
    values[0, 1, 2, 3] = np.nan
    packed = pack_values(values)
    np.testing.assert_allclose(unpacked(packed, values.shape), values, rtol=0, atol=rounding_error(values) * 1.0001)


def test_each_head_is_scaled_to_its_own_range() -> None:
    values = np.array([[[0.0, 1.0], [0.0, 1e6]]])
    assert pack_values(values)["step"] == pytest.approx([1 / 65534, 1e6 / 65534])


def test_constant_and_empty_heads() -> None:
    packed = pack_values(np.array([[[2.5, 2.5], [np.nan, np.nan]]]))
    assert packed["low"] == [2.5, 0.0]
    assert packed["step"] == [0.0, 0.0]
    assert unpacked(packed, (4,)).tolist() == pytest.approx([2.5, 2.5, np.nan, np.nan], nan_ok=True)


def test_keys_are_exact_and_those_without_a_code_refused() -> None:
    keys = np.array([[[0, -1, 65534]]], dtype=np.int32)
    assert unpacked(pack_keys(keys), (3,)).tolist() == pytest.approx([0, np.nan, 65534], nan_ok=True)
    with pytest.raises(InputError, match="at most 65535 tokens; got a key at 65535"):
        pack_keys(np.array([[[65535]]], dtype=np.int32))


def some_pattern() -> np.ndarray:
    """2 layers × 3 heads × 4 × 5 with zeros, one value near 1, and some of float32's smallest values."""
    logits = np.random.default_rng(1).normal(size=(2, 3, 4, 5)) * np.array([1, 8, 30]).reshape(1, 3, 1, 1)
    logits[..., 2] = -np.inf
    return (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)


def test_logarithms_keep_every_ratio_within_what_is_said() -> None:
    pattern = some_pattern()
    packed = pack_logarithms(pattern)
    back = unpacked(packed, pattern.shape)
    said = re.fullmatch(r"Each probability is within (.*) % of its value\.", rounding_note(packed))
    assert said
    seen = pattern > 0
    assert (back[~seen] == 0).all()
    assert np.abs(back[seen] / pattern[seen] - 1).max() <= 1.06 * float(said[1]) / 100


def test_many_probabilities_have_8_bits_of_their_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = some_pattern()
    assert pack_probabilities(pattern)["scale"] == "logarithm"
    monkeypatch.setattr(packing, "MOST_LOGARITHMS", 10)
    packed = pack_probabilities(pattern)
    error = np.abs(unpacked(packed, pattern.shape) - pattern)
    assert rounding_note(packed) == "Probabilities are off by at most 0.004, those below 0.01 by at most 0.0004."
    assert error.max() <= 0.004
    assert error[pattern < 0.01].max() <= 0.0004
