"""The sentence view: lines from query tokens to the key tokens that they attend to, as in AttentionViz and BertViz."""

from collections.abc import Sequence
from typing import Final

from ..basics.arguments import listed
from ..basics.public import public
from ..errors import InputError
from .embed import View
from .patterns import PROBABILITY, Array, Measure
from .token_weights import token_weights

READING: Final = (
    "Lines lead from each query token (left) to the key tokens that it attends to (right); opacity shows the "
    "weight. Hover over a token to see only its lines; click it or press Enter to keep them, and press Escape to "
    "show all again. With several heads, or their mean, click a head in the legend to switch it off or on. A hidden "
    "token has no lines; its weight is redistributed to the others in proportion. High attention does not show that "
    "a token matters for the output. "
)


@public
def sentence_view(
    pattern: Array,
    tokens: Sequence[str],
    *,
    layers: Sequence[int],
    keys: Sequence[str] | None = None,
    head: int = 0,
    special: Sequence[bool] | None = None,
    sums_to_one: bool = True,
    measure: Measure = PROBABILITY,
    title: str = "Sentence view",
) -> View:
    """Draws lines between two columns of tokens, for one head, all heads of a layer, or their mean.

    The reader can switch off heads of a layer; the mean is then over the other heads.

    Without the hidden keys H, the weights are a_ij / (Σ_{k∉H} a_ik + r_i), with r_i = 1 − Σ_k a_ik if `sums_to_one` is
    False: a sink stays in the softmax, and r_i is known to about 1e-6. Each head is normalised before the mean is
    taken.

    >>> import numpy as np
    >>> view = sentence_view(np.array([[[[1.0, 0.0], [0.25, 0.75]]]]), ["Hi", " !"], layers=[3])
    >>> view.data["queries"], view.data["special"]
    (['Hi', '·!'], [False, False])

    Args:
        pattern: probabilities after softmax, [layer head query key].
        tokens: the query tokens.
        layers: the layers' numbers, in the pattern's order.
        keys: the key tokens in cross-attention; the query tokens by default.
        special: for each key token, whether it is special ([CLS], <s>) and can be hidden; by default none is.
        head: the head that is shown first.
        sums_to_one: whether every row must sum to 1; if not, to at most 1, as when a sink takes the rest.
        measure: what the weights are, if not probabilities.
        title: the view's heading.

    """
    data, remarks = token_weights(
        pattern, tokens, layers=layers, keys=keys, head=head, sums_to_one=sums_to_one, measure=measure
    )
    count = len(data["keys"])
    marks = [False] * count if special is None else listed("special", special, "a list of bools")
    if len(marks) != count:
        raise InputError(f"`special` must have one bool for each of the {count} key tokens; got {len(marks)}.")
    data["special"] = [bool(mark) for mark in marks]
    return View("sentence", title, READING + remarks, data)
