"""Packs arrays for a page: 16 or 8 bits per number, scaled within each head, compressed, as base64.

value = low + step · code, with one low and one step for each (layer, head): with 16 bits, the rounding error is at
most half a step, 1/131068 of the head's range. The highest code means "no value" (NaN, or key -1). numbers.js reads it.
"""

import json
import math
from base64 import b64encode
from gzip import compress
from typing import Final, Literal, NotRequired, TypedDict

import numpy as np
from jaxtyping import Float, Integer, UInt8, UInt16

from ..errors import InputError
from .text import bound, printable

NO_VALUE: Final = 65535

MOST_LOGARITHMS: Final = 2_000_000
"""Views of up to this many probabilities store 16 bits of each logarithm, larger ones 8 bits of each root."""


class PackedValues(TypedDict):
    """Numbers as a page stores them: one low and one step per head, and the codes of all heads."""

    low: list[float]
    step: list[float]
    codes: str  # all high bytes, then all low bytes, compressed with gzip, as base64; 8-bit codes have one byte each
    scale: NotRequired[Literal["logarithm", "root"]]
    """Whether a value v means the probability exp(v) ("logarithm") or v² ("root")."""


def pack_values(values: Float[np.ndarray, "..."], axes: int = 2) -> PackedValues:
    """Packs the values of every head, each head scaled to its own range; the first `axes` axes index heads.

    >>> packed = pack_values(np.array([[[1.0, 3.0, np.nan]]], dtype=np.float32))
    >>> packed["low"], [round(step * 65534, 3) for step in packed["step"]]
    ([1.0], [2.0])
    """
    blocks = _by_block(values, axes)
    present = ~np.isnan(blocks)
    low, step = _scale(blocks)
    steps_up = (blocks - low[:, None]) / np.where(step > 0, step, 1.0)[:, None]
    codes = np.where(present, np.rint(np.where(present, steps_up, 0.0)), NO_VALUE)
    return {"low": low.tolist(), "step": step.tolist(), "codes": _planes(codes.astype(np.uint16))}


def pack_keys(keys: Integer[np.ndarray, "..."], axes: int = 2) -> PackedValues:
    """Packs key indices exactly: low 0 and step 1; -1 becomes the code for "no value"."""
    if keys.max(initial=0) >= NO_VALUE:
        raise InputError(
            f"a page holds texts of at most {NO_VALUE} tokens; got a key at {keys.max()}. Shorten the text."
        )
    blocks = math.prod(keys.shape[:axes])
    codes = np.where(keys < 0, NO_VALUE, keys).astype(np.uint16)
    return {"low": [0.0] * blocks, "step": [1.0] * blocks, "codes": _planes(codes)}


def pack_logarithms(pattern: Float[np.ndarray, "..."], axes: int = 2) -> PackedValues:
    """Packs the logarithms of probabilities, which preserves the ratios of small ones; 0 becomes "no value".

    A row can then be normalised again without one of its keys, even if that key has nearly all of the attention.
    """
    return pack_values(logarithms(pattern), axes) | {"scale": "logarithm"}


def pack_probabilities(pattern: Float[np.ndarray, "layer head *rest"]) -> PackedValues:
    """Packs probabilities for maps: as logarithms up to `MOST_LOGARITHMS`, as square roots in 8 bits beyond that."""
    if pattern.size <= MOST_LOGARITHMS:
        return pack_logarithms(pattern)
    blocks = pattern.shape[0] * pattern.shape[1]
    codes = np.rint(np.sqrt(pattern.clip(0, 1)) * 255).astype(np.uint8)
    return {"low": [0.0] * blocks, "step": [1 / 255] * blocks, "codes": _compressed(codes), "scale": "root"}


def rounding_note(packed: PackedValues, what: str = "probability") -> str:
    """Says in a sentence how large the rounding error of packed probabilities or other shares can be.

    >>> rounding_note(pack_logarithms(np.array([[[0.25, 0.75]]])))
    'Each probability is within 0.001 % of its value.'
    """
    error = max(packed["step"]) / 2
    if packed.get("scale") == "root":
        many = "Probabilities" if what == "probability" else "Weights"
        return f"{many} are off by at most {bound(2 * error)}, those below 0.01 by at most {bound(0.2 * error)}."
    return f"Each {what} is within {bound(max(100 * error, 1e-3))} % of its value."


def rounding_error(values: Float[np.ndarray, "..."], axes: int = 2) -> float:
    """Returns the largest rounding error of packed values, in their units."""
    return float(_scale(_by_block(values, axes))[1].max()) / 2


def pack_texts(texts: tuple[str, ...]) -> str:
    """Packs texts as a compressed JSON list."""
    return _gzipped(json.dumps([printable(text) for text in texts]).encode())


def logarithms(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The natural logarithm; NaN for 0."""
    with np.errstate(divide="ignore"):
        logs = np.log(values, dtype=np.float64)
    return np.where(np.isfinite(logs), logs, np.nan)


def _by_block(values: Float[np.ndarray, "..."], axes: int) -> Float[np.ndarray, "block value"]:
    return values.reshape(math.prod(values.shape[:axes]), -1).astype(np.float64)


def _scale(blocks: Float[np.ndarray, "block value"]) -> tuple[Float[np.ndarray, " block"], Float[np.ndarray, " block"]]:
    """Returns the low and the step of each block; both are 0 for a block without values."""
    present = ~np.isnan(blocks)
    some = present.any(axis=1)
    low = np.where(some, blocks.min(axis=1, where=present, initial=np.inf), 0.0)
    high = np.where(some, blocks.max(axis=1, where=present, initial=-np.inf), 0.0)
    return low, (high - low) / (NO_VALUE - 1)


def _planes(codes: UInt16[np.ndarray, "..."]) -> str:
    """Returns all high bytes, then all low bytes, because neighbouring high bytes are similar and compress well."""
    flat = codes.reshape(-1)
    return _compressed(np.concatenate([flat >> 8, flat & 255]).astype(np.uint8))


def _compressed(codes: UInt8[np.ndarray, "..."]) -> str:
    return _gzipped(codes.tobytes())


def _gzipped(content: bytes) -> str:
    return b64encode(compress(content, compresslevel=6, mtime=0)).decode("ascii")
