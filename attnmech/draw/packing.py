"""How a page carries arrays: 16 bits a number, scaled within each head, as base64.

value = low + step · code, with one low and one step for each (layer, head). The rounding error is at most half a
step, that is 1/131068 of the head's range. Code 65535 means "no value" (NaN, or key -1).
"""

from base64 import b64encode
from typing import Final, TypedDict

import numpy as np
from jaxtyping import Float, Int32, UInt16

from attnmech.errors import InputError

NO_VALUE: Final = 65535


class PackedValues(TypedDict):
    """Numbers as a page carries them: one low and one step a head, and the codes of all heads."""

    low: list[float]
    step: list[float]
    codes: str


def pack_values(values: Float[np.ndarray, "layer head *rest"]) -> PackedValues:
    """The values of every head, each head scaled to its own range.

    >>> packed = pack_values(np.array([[[1.0, 3.0, np.nan]]], dtype=np.float32))
    >>> packed["low"], packed["codes"]
    ([1.0], 'AAD+////')
    """
    layers, heads = values.shape[:2]
    blocks = values.reshape(layers * heads, -1).astype(np.float64)
    present = ~np.isnan(blocks)
    some = present.any(axis=1)
    low = np.where(some, blocks.min(axis=1, where=present, initial=np.inf), 0.0)
    high = np.where(some, blocks.max(axis=1, where=present, initial=-np.inf), 0.0)
    step = (high - low) / (NO_VALUE - 1)
    steps_up = (blocks - low[:, None]) / np.where(step > 0, step, 1.0)[:, None]
    codes = np.where(present, np.rint(np.where(present, steps_up, 0.0)), NO_VALUE)
    return {"low": low.tolist(), "step": step.tolist(), "codes": _base64(codes.astype(np.uint16))}


def pack_keys(keys: Int32[np.ndarray, "layer head *rest"]) -> PackedValues:
    """Key indices, exact: low 0 and step 1; -1 becomes the code for "no value"."""
    if keys.max() >= NO_VALUE:
        raise InputError(f"A page holds texts of up to {NO_VALUE} tokens; got a key at {keys.max()}. Shorten the text.")
    blocks = keys.shape[0] * keys.shape[1]
    codes = np.where(keys < 0, NO_VALUE, keys).astype(np.uint16)
    return {"low": [0.0] * blocks, "step": [1.0] * blocks, "codes": _base64(codes)}


def rounding_error(values: Float[np.ndarray, "layer head *rest"]) -> float:
    """The largest distance that packing can put between a value and its code, in the values' units."""
    return max(pack_values(values)["step"]) / 2


def _base64(codes: UInt16[np.ndarray, "..."]) -> str:
    return b64encode(codes.astype("<u2").tobytes()).decode("ascii")
