"""The data of views with lines between tokens: logarithms of the weights, tokens and layers."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from ..basics.nouns import TEXT
from ..errors import InputError
from .embed import MOST_BYTES
from .packing import pack_logarithms, rounding_note
from .patterns import Array, Measure, as_array, checked_pattern, of_layers

ROUNDING: Final = 1e-6  # a row of float32 probabilities that falls short of 1 by less than this is taken to sum to 1


def token_weights(
    pattern: Array,
    tokens: Sequence[str],
    *,
    layers: Sequence[int],
    keys: Sequence[str] | None,
    head: int,
    sums_to_one: bool,
    measure: Measure,
) -> tuple[dict[str, Any], str]:
    """Returns the data of a view with lines between tokens, and the end of its reading: on the weights and rounding.

    `rest` is the part of each row that goes to no key (the share of a sink, or of keys that were cut off); if a key is
    hidden, `rest` still takes part in the softmax. The data have `rest` only if `sums_to_one` is False.
    """
    # A compressed logarithm takes one or two bytes; the exact size is checked after compression.
    pattern = as_array(pattern)
    if pattern.size > MOST_BYTES:
        raise InputError(
            f"a view of lines holds up to {MOST_BYTES / 1e6:.0f} million probabilities; the shape {pattern.shape} "
            f"has {pattern.size / 1e6:.0f} million. Select fewer layers or heads, or shorten the text."
        )
    probabilities = checked_pattern(pattern, tokens, keys, axes="layer head query key", sums_to_one=sums_to_one)
    packed = pack_logarithms(probabilities)
    data = of_layers(probabilities, tokens, layers=layers, keys=keys, head=head, measure=measure)
    data |= {"pattern": packed, "nouns": TEXT.for_views}
    rest = {} if sums_to_one else {"rest": pack_logarithms(unattended(probabilities))}
    return data | rest, measure.reading + rounding_note(packed, measure.weight)


def unattended(pattern: Float[np.ndarray, "layer head query key"]) -> Float[np.ndarray, "layer head query"]:
    """Returns the part of each row that goes to no key; rounding errors count as 0."""
    rest = 1 - pattern.sum(axis=-1, dtype=np.float64)
    return np.where(rest > ROUNDING, rest, 0)
