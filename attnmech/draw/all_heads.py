"""All heads of a model at a glance: one small attention map per head, and a large map of the selected head."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from ..basics.public import public
from ..errors import InputError
from .embed import View
from .packing import pack_keys, pack_probabilities, rounding_note
from .patterns import PROBABILITY, Array, Measure, as_array, checked_pattern, of_layers

MOST_NUMBERS: Final = 40_000_000
"""The most probabilities in a view, a byte each in a browser; 24 layers × 16 heads × 256² are 25 million."""

READING: Final = (
    "One small map per head, one row of maps per layer; in each map, queries run down and keys across. All maps "
    "share one scale: opacity grows with the square root of the weight, so a weight of 1 % remains visible; a pixel "
    "that covers several cells shows the largest. Click a map, or move with the arrow keys, to enlarge it. High "
    "attention does not show that a token matters for the output. "
)


@public
def model_view(
    pattern: Array,
    tokens: Sequence[str],
    *,
    layers: Sequence[int],
    keys: Sequence[str] | None = None,
    head: int = 0,
    sums_to_one: bool = True,
    measure: Measure = PROBABILITY,
    title: str = "Attention of all heads",
) -> View:
    """Shows small maps of all heads on one scale, and a large map of the selected head with its tokens.

    >>> view = model_view(np.array([[[[1.0, 0.0], [0.25, 0.75]]]]), ["Hi", "!"], layers=[3])
    >>> view.data["rows"], view.data["means"]
    (1, {'first': [0.25], 'self': [0.75], 'previous': [0.25]})

    Args:
        pattern: probabilities after softmax, [layer head query key].
        tokens: the query tokens.
        layers: the layers' numbers, in the pattern's order.
        keys: the key tokens in cross-attention; the query tokens by default.
        head: the head that is shown first.
        sums_to_one: whether every row must sum to 1; if not, to at most 1, as when a sink takes the rest.
        measure: what the weights are, if not probabilities.
        title: the view's heading.

    """
    pattern = as_array(pattern)
    size = pattern.size
    if size > MOST_NUMBERS:
        raise InputError(
            f"a model view holds up to {MOST_NUMBERS / 1e6:.0f} million probabilities; the shape {pattern.shape} has "
            f"{size / 1e6:.0f} million. Select fewer layers or heads, or shorten the text."
        )
    probabilities = checked_pattern(pattern, tokens, keys, axes="layer head query key", sums_to_one=sums_to_one)
    packed = pack_probabilities(probabilities)
    data = of_layers(probabilities, tokens, layers=layers, keys=keys, head=head, measure=measure)
    data |= {"pattern": packed, **_per_head(probabilities, aligned=keys is None)}
    return View("model", title, READING + measure.reading + rounding_note(packed, measure.weight), data)


def _per_head(pattern: Float[np.ndarray, "layer head query key"], *, aligned: bool) -> dict[str, Any]:
    """Computes the numbers that describe each head from the unrounded probabilities, because rounding would add ties.

    `rows` is the number of rows with a choice. `top` is the key that each row attends to most (-1: no choice, or a
    tie). `means` is the mean attention of the rows with a choice to the first key and, if the keys are the queries
    (`aligned`), to the token itself and to the previous token.
    """
    # A row has a choice if some head sees two or more keys; a head with all its weight on one key has a choice too.
    choice = np.asarray(np.any(np.count_nonzero(pattern, axis=-1) > 1, axis=(0, 1)))
    rows = np.flatnonzero(choice)
    ends = {"first": (rows, np.zeros_like(rows))}
    if aligned:
        after = rows[rows > 0]
        ends |= {"self": (rows, rows), "previous": (after, after - 1)}
    highest = pattern.max(axis=-1, keepdims=True)
    single = np.count_nonzero(pattern == highest, axis=-1) == 1
    top = np.where(single & choice, pattern.argmax(axis=-1), -1).astype(np.int32)
    means = {}
    for name, (queries, keys) in ends.items():
        total = pattern[:, :, queries, keys].sum(axis=-1, dtype=np.float64)
        means[name] = [round(float(mean), 6) for mean in (total / max(len(queries), 1)).flat]
    return {"rows": len(rows), "top": pack_keys(top), "means": means}
