"""The token graph: tokens are nodes, and an edge leads from a query to each key whose weight reaches the threshold."""

from collections.abc import Sequence
from numbers import Real
from typing import Final

from ..basics.arguments import shown
from ..basics.public import public
from ..errors import InputError
from .embed import View
from .patterns import PROBABILITY, Array, Measure
from .token_weights import token_weights

READING: Final = (
    "Arrows lead from each query token to the key tokens that receive at least the threshold; width shows the "
    "weight. Arrows to earlier tokens pass above the line, arrows to later tokens below, and a loop is attention to "
    "the token itself. In print, the line is folded into several. Hover over a token to see only its arrows; click "
    "it or press Enter to keep them, and press Escape to show all again. High attention does not show that a token "
    "matters for the output. "
)
READING_ACROSS: Final = (
    "Arrows lead from each query token (top) to the key tokens (bottom) that receive at least the threshold; width "
    "shows the weight. Hover over a token to see only its arrows; click it or press Enter to keep them, and press "
    "Escape to show all again. High attention does not show that a token matters for the output. "
)


@public
def token_graph(
    pattern: Array,
    tokens: Sequence[str],
    *,
    layers: Sequence[int],
    keys: Sequence[str] | None = None,
    head: int = 0,
    threshold: float = 0.1,
    sums_to_one: bool = True,
    measure: Measure = PROBABILITY,
    title: str = "Token graph",
) -> View:
    """Draws an edge from a query to each key with a weight of at least `threshold`, for one head or the mean of a
    layer.

    The reader can hide the first key; the softmax is then recomputed without it, as in `sentence_view`.

    >>> import numpy as np
    >>> view = token_graph(np.array([[[[1.0, 0.0], [0.25, 0.75]]]]), ["Hi", " !"], layers=[3], threshold=0.5)
    >>> view.data["threshold"]
    0.5

    Args:
        pattern: probabilities after softmax, [layer head query key].
        tokens: the query tokens.
        layers: the layers' numbers, in the pattern's order.
        keys: the key tokens in cross-attention, drawn on a separate line.
        threshold: the initial threshold, above 0 and up to 1.
        head: the head that is shown first.
        sums_to_one: whether every row must sum to 1; if not, to at most 1, as when a sink takes the rest.
        measure: what the weights are, if not probabilities.
        title: the view's heading.

    """
    if not (isinstance(threshold, Real) and 0 < threshold <= 1):
        raise InputError(f"`threshold` must be above 0 and at most 1; got {shown(threshold)}. Try 0.1.")
    data, remarks = token_weights(
        pattern, tokens, layers=layers, keys=keys, head=head, sums_to_one=sums_to_one, measure=measure
    )
    data |= {"threshold": threshold, "across": keys is not None}
    return View("token_graph", title, (READING if keys is None else READING_ACROSS) + remarks, data)
