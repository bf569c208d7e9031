"""The numbers of every method on the demo model in November 2026, which must not change when code is rewritten.

`python tests/test_numbers.py` rewrites them after a correction.
"""

import sys
from functools import cache
from pathlib import Path

import models
import pandas as pd
import pytest

import attnmech as am
from attnmech.demo.text import documents

NUMBERS = Path(__file__).with_name("numbers")

TEXT = "Anna sang of shells. The keys to the cabinet are here, said Anna to Tom."

ROUNDING = 2e-5
"""Different processors add numbers in different orders."""


@cache
def texts() -> list[str]:
    return [TEXT, *documents(6)]


FRAMES = {
    "scores": lambda model: am.decompose_scores(model, TEXT),
    "focus": lambda model: am.attention_focus(model, TEXT),
    "focus_of_a_corpus": lambda model: am.attention_focus(model, iter(texts())),
    "updates": lambda model: am.residual_updates(model, TEXT),
    "effects": lambda model: am.ablate_heads(model, iter(texts()), layers=[1, 2]),
    "null": lambda model: am.null_attention(model, iter(documents(24)), layers=[1, 2]),
    "importance": lambda model: am.head_importance(model, iter(texts())),
    "pairs": lambda model: am.ablate_pairs(model, iter(texts()), [((1, 0), (1, 3)), ((1, 3), (2, 6))]),
    "pruning": lambda model: am.prune_heads(model, iter(texts()), heads=[(1, 0), (1, 3), (2, 6)]),
    "sources": lambda model: am.decompose_by_source(model, TEXT, heads=[(2, 6)], cells=[(9, 6), (18, 3)]),
}


def measured(name: str) -> pd.DataFrame:
    return FRAMES[name](models.demo()).to_frame()


@pytest.mark.parametrize("name", FRAMES)
def test_the_numbers_are_those_of_before(name: str) -> None:
    now = measured(name)
    before = pd.read_csv(NUMBERS / f"{name}.csv", keep_default_na=False, na_values=["NaN"])
    assert list(now.columns) == list(before.columns)
    for column in before.columns.drop("residual", errors="ignore"):  # which is rounding itself
        if before[column].dtype.kind == "f":
            # Interactions and effects are differences of losses, and have the losses' absolute rounding errors.
            largest = before[column.replace("interaction", "both")].abs().max()
            close = {"rtol": ROUNDING, "atol": max(ROUNDING * largest, 5e-7), "check_dtype": False}
            pd.testing.assert_series_equal(now[column], before[column], **close)
        else:
            assert now[column].tolist() == before[column].tolist(), column


if __name__ == "__main__":
    NUMBERS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FRAMES:
        measured(name).to_csv(NUMBERS / f"{name}.csv", index=False, na_rep="NaN")
