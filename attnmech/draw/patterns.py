"""Checks patterns and their tokens before attention views draw them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..basics.arguments import dense, flag, index_of, listed, shown, strings, whole_number
from ..basics.messages import first_line
from ..errors import InputError
from .text import visible_token

Array = np.ndarray | Tensor | Sequence[Any]

ROW_SUM: Final = 5e-3  # the tolerance for the sum of a row; sums of float16 probabilities have errors of this size


@dataclass(frozen=True)
class Measure:
    """The words for the weights of a view."""

    weight: str  # the word for one weight, such as "probability"
    whole: str  # the word for the whole that a row's weights share, such as "attention"
    mark: str = ""  # the words that a sentence adds to the name of a head, such as " (value-weighted)"
    reading: str = ""  # a sentence that explains the measure to the reader

    @property
    def words(self) -> dict[str, str]:
        return {"weight": self.weight, "whole": self.whole, "mark": self.mark}


PROBABILITY: Final = Measure("probability", "attention")

VALUE_WEIGHTED: Final = Measure(
    "share of the row's ‖p f(x)‖",
    "value-weighted attention",
    " (value-weighted)",
    "Value-weighted attention is ‖p f(x)‖, the norm of what the head writes from a key to the query, divided by its "
    "row's sum; f(x) = (x W_V + b_V) W_O (Kobayashi et al. 2020). A key with a high p and a small value contributes "
    "little. ",
)


def value_weighted(
    pattern: Float[np.ndarray, "*head query key"], norms: Float[np.ndarray, "*head key"]
) -> Float[np.ndarray, "*head query key"]:
    """Returns p_ij n_j / Σ_k p_ik n_k, each key's share in the sum of its row; 0 in a row whose sum is 0.

    >>> value_weighted(np.array([[0.75, 0.25]]), np.array([1.0, 3.0]))
    array([[0.5, 0.5]])
    """
    carried = pattern * norms[..., None, :]
    whole = carried.sum(axis=-1, keepdims=True)
    shares: Float[np.ndarray, "*head query key"] = np.zeros_like(carried)
    np.divide(carried, whole, out=shares, where=whole > 0)
    return shares


def checked_pattern(
    pattern: Array, tokens: Sequence[str], keys: Sequence[str] | None, *, axes: str, sums_to_one: bool
) -> Float[np.ndarray, "..."]:
    """Returns the pattern as a float32 array, after checks of its axes, tokens and rows, which must be probabilities.

    `axes` names the expected axes, such as "head query key". Each row must sum to 1 or, without `sums_to_one`, to at
    most 1, as when a sink takes the rest.
    """
    flag("sums_to_one", sums_to_one)
    strings("tokens", tokens)
    if keys is not None:
        strings("keys", keys)
    array = as_array(pattern)
    names = axes.split()
    if array.ndim != len(names):
        raise InputError(f"`pattern` must have the axes [{axes}]; got the shape {array.shape}.")
    if not array.size:
        raise InputError(
            f"the selection is empty: `pattern` has the shape {array.shape}. Select at least one layer, head and text."
        )
    for axis, name, labels in ((-2, "query", tokens), (-1, "key", tokens if keys is None else keys)):
        if array.shape[axis] != len(labels):
            raise InputError(
                f"`pattern` must have one {name} for each of the {len(labels)} tokens; got {array.shape[axis]}. Pass "
                "the tokens of the text that the pattern comes from, including special tokens."
            )
    if (odd := ~np.isfinite(array) | (array < 0)).any():
        raise InputError(
            "`pattern` must hold probabilities: finite numbers from 0 to 1, after the softmax. "
            f"Got {float(array[odd][0])}; are these scores?"
        )
    sums = array.sum(axis=-1, dtype=np.float64)
    wrong = (sums > 1 + ROW_SUM) | ((sums < 1 - ROW_SUM) if sums_to_one else np.zeros_like(sums, dtype=bool))
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
        hint = (
            ""
            if sums[place] > 1
            else " If a sink takes the rest of a row, or keys were removed, pass sums_to_one=False."
        )
        raise InputError(
            f"every row of `pattern` must sum to 1 over the keys; {where} sums to {sums[place]:.4g}.{hint}"
        )
    return array


def of_layers(
    array: Float[np.ndarray, "layer head query key"],
    tokens: Sequence[str],
    *,
    layers: Sequence[int],
    keys: Sequence[str] | None,
    head: int,
    measure: Measure,
) -> dict[str, Any]:
    """The data of a view of several layers besides its numbers: layers, heads, tokens, words, first selection."""
    numbers = listed("layers", layers, "a list of ints")
    if len(numbers) != len(array):
        raise InputError(f"`layers` must have one number for each of the {len(array)} layers; got {len(numbers)}.")
    queries = [visible_token(token) for token in tokens]
    return {
        "layers": [whole_number("layers", layer) for layer in numbers],
        "heads": array.shape[1],
        "queries": queries,
        "keys": queries if keys is None else [visible_token(token) for token in keys],
        "chosen": {"layer": 0, "head": index_of("head", head, array.shape[1])},
        "words": measure.words,
    }


def as_array(values: Array, dtype: type[np.floating] = np.float32) -> Float[np.ndarray, "..."]:
    """Returns the values as an array of floats in main memory; the members of a list are stacked."""
    source: Any = values
    if isinstance(source, Tensor):
        source = dense("the values to draw", source).detach().cpu()
        source = (source if source.is_complex() else source.double()).numpy()
    elif isinstance(source, list | tuple) and any(isinstance(member, Tensor) for member in source):
        source = [as_array(member, dtype) for member in source]
    try:
        array = np.asarray(source)
        if np.iscomplexobj(array):
            raise TypeError("numbers that are complex")
        return array.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        wanted = "the values to draw must be a tensor, an array or a list of equal-length rows of real numbers"
        raise InputError(f"{wanted}; got {shown(values)} ({first_line(error)}).") from error


def require_length(length: int, tokens: Sequence[str], name: str) -> None:
    """Raises `InputError` unless an array has one entry for each token."""
    if length != len(tokens):
        raise InputError(
            f"`{name}` must have one entry for each of the {len(tokens)} tokens; got {length}. Pass the tokens of "
            "the text that the numbers come from."
        )
