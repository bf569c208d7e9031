"""Arrays come back from 16 bits within the error that packing states."""

from base64 import b64decode

import numpy as np
import pytest

from attnmech.draw.packing import NO_VALUE, pack_keys, pack_values, rounding_error
from attnmech.errors import InputError


def codes(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), dtype="<u2")


def test_values_come_back_within_the_stated_error() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5, 7)) * np.array([1, 10, 1000]).reshape(1, 3, 1, 1)
    values[0, 1, 2, 3] = np.nan
    packed = pack_values(values)
    code = codes(packed["codes"]).reshape(6, 35)
    back = np.array(packed["low"])[:, None] + np.array(packed["step"])[:, None] * code
    back[code == NO_VALUE] = np.nan
    np.testing.assert_allclose(back.reshape(values.shape), values, rtol=0, atol=rounding_error(values) * 1.0001)


def test_each_head_is_scaled_to_its_own_range() -> None:
    values = np.array([[[0.0, 1.0], [0.0, 1e6]]])
    assert pack_values(values)["step"] == pytest.approx([1 / 65534, 1e6 / 65534])


def test_constant_and_empty_heads() -> None:
    packed = pack_values(np.array([[[2.5, 2.5], [np.nan, np.nan]]]))
    assert packed["low"] == [2.5, 0.0]
    assert packed["step"] == [0.0, 0.0]
    assert codes(packed["codes"]).tolist() == [0, 0, NO_VALUE, NO_VALUE]


def test_keys_are_exact() -> None:
    keys = np.array([[[0, -1, 65534]]], dtype=np.int32)
    assert codes(pack_keys(keys)["codes"]).tolist() == [0, NO_VALUE, 65534]


def test_a_key_that_has_no_code_is_refused() -> None:
    with pytest.raises(InputError, match="up to 65535 tokens; got a key at 65535"):
        pack_keys(np.array([[[65535]]], dtype=np.int32))
