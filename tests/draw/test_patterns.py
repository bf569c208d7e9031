"""Views of attention refuse invalid input with helpful messages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnmech.draw import model_view, sentence_view, token_graph
from attnmech.draw.embed import View
from attnmech.draw.patterns import checked_pattern
from attnmech.errors import InputError

TOKENS = ["a", "b", "c"]
GOOD = np.tril(np.ones((2, 4, 3, 3))) / np.array([1, 2, 3])[:, None]


def check(pattern: np.ndarray, tokens: list[str] = TOKENS, keys: list[str] | None = None, whole: bool = True) -> None:
    checked_pattern(pattern, tokens, keys, axes="layer head query key", sums_to_one=whole)


def test_probabilities_of_any_precision_pass() -> None:
    check(GOOD)
    check(torch.from_numpy(GOOD).bfloat16().float().numpy())
    found = checked_pattern(torch.from_numpy(GOOD).half(), TOKENS, None, axes="layer head query key", sums_to_one=True)
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("factor", "whole", "message"),
    [
        (1.02, True, r"must sum to 1 over the keys; layer 1, head 2, query 1 sums to 1\.02\.$"),
        (1.02, False, r"layer 1, head 2, query 1 sums to 1\.02\.$"),
        (0.7, True, r"query 1 sums to 0\.7\. If a sink takes the rest .* pass sums_to_one=False"),
    ],
)
def test_rows_that_do_not_sum_to_one(factor: float, whole: bool, message: str) -> None:
    pattern = GOOD.copy()
    pattern[1, 2, 1] *= factor
    with pytest.raises(InputError, match=message):
        check(pattern, whole=whole)


def test_a_sink_takes_the_rest_of_a_row() -> None:
    check(GOOD * 0.7, whole=False)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (GOOD[0], r"must have the axes \[layer head query key\]; got the shape \(4, 3, 3\)"),
        (GOOD[:0], r"the selection is empty: `pattern` has the shape \(0, 4, 3, 3\)"),
        (GOOD[:, :, :2], "must have one query for each of the 3 tokens; got 2. Pass the tokens of the text"),
        (GOOD[:, :, :, :2], "must have one key for each of the 3 tokens; got 2"),
        (GOOD - 1, r"finite numbers from 0 to 1, after the softmax. Got -1.0; are these scores\?"),
        (np.where(GOOD == 0, -np.inf, GOOD), "Got -inf; are these scores"),
        (GOOD * np.nan, "Got nan"),
    ],
)
def test_what_is_no_pattern_of_these_tokens(pattern: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(pattern)


def test_keys_of_another_text() -> None:
    check(np.full((1, 1, 3, 5), 0.2), keys=list("vwxyz"))
    with pytest.raises(InputError, match="one key for each of the 4 tokens; got 5"):
        check(np.full((1, 1, 3, 5), 0.2), keys=list("wxyz"))


@pytest.mark.parametrize("view", [model_view, sentence_view, token_graph])
def test_every_view_checks_its_pattern_its_layers_and_its_head(view: Callable[..., View]) -> None:
    large = np.broadcast_to(np.float32(0.001), (5, 10, 1000, 1000))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"head": 4}, "`head` must be from 0 to 3; got 4"),
        ({"layers": [2]}, "`layers` must have one number for each of the 2 layers; got 1"),
        ({"keys": list("wxyz")}, "one key for each of the 4 tokens; got 3"),
        ({"tokens": TOKENS[:2]}, "one query for each of the 2 tokens; got 3"),
        ({"pattern": GOOD / 2}, "must sum to 1"),
        ({"pattern": GOOD[0]}, r"must have the axes \[layer head query key\]"),
        (
            {"pattern": large, "tokens": ["a"] * 1000, "layers": range(5)},
            r"up to 40 million .* \(5, 10, 1000, 1000\) has 50 million",
        ),
    ]
    given = {"pattern": GOOD, "tokens": TOKENS, "layers": [0, 1]}
    for changes, message in wrong:
        with pytest.raises(InputError, match=message):
            view(**(given | changes))
    assert view(**(given | {"pattern": GOOD / 2}), sums_to_one=False).data["heads"] == 4
