"""Arrays packed in 16 bits are restored within the stated error."""

import re

import numpy as np
import pytest
from unpacking import unpacked

from attnmech.draw.packing import pack_keys, pack_logarithms, pack_values, rounding_error, rounding_note
from attnmech.errors import InputError


def test_each_head_comes_back_within_half_a_step_of_its_own_range() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5, 7)) * np.array([1, 10, 1000]).reshape(1, 3, 1, 1)
    values[0, 1, 2, 3] = np.nan
    values[0, 0], values[1, 0] = 2.5, np.nan  # constant, and empty
    back = unpacked(pack_values(values), values.shape)
    for head in np.ndindex(2, 3):
        there = values[head][~np.isnan(values[head])]
        limit = 1.0001 * np.ptp(there) / 131068 if there.size else 0.0
        np.testing.assert_allclose(back[head], values[head], rtol=0, atol=limit)
    assert rounding_error(values) >= np.nanmax(np.abs(back - values))


def test_keys_are_exact_and_those_without_a_code_refused() -> None:
    keys = np.array([[[0, -1, 65534]]], dtype=np.int32)
    assert unpacked(pack_keys(keys), (3,)).tolist() == pytest.approx([0, np.nan, 65534], nan_ok=True)
    with pytest.raises(InputError, match="at most 65535 tokens; got a key at 65535"):
        pack_keys(np.array([[[65535]]], dtype=np.int32))


def test_logarithms_keep_every_ratio_within_what_is_said() -> None:
    """With zeros, a value near 1, and some of float32's smallest values."""
    logits = np.random.default_rng(1).normal(size=(2, 3, 4, 5)) * np.array([1, 8, 30]).reshape(1, 3, 1, 1)
    logits[..., 2] = -np.inf
    pattern = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)
    packed = pack_logarithms(pattern)
    back = unpacked(packed, pattern.shape)
    said = re.fullmatch(r"Each probability is within (.*) % of its value\.", rounding_note(packed))
    assert said
    seen = pattern > 0
    assert (back[~seen] == 0).all()
    assert np.abs(back[seen] / pattern[seen] - 1).max() <= 1.06 * float(said[1]) / 100
