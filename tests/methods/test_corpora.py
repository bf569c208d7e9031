"""A list of texts, a corpus, its shards merged in any order, blocks of rows and a resumed run give the same numbers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import models
import pandas as pd
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError, JournalError
from attnmech.methods.examples.result import KINDS
from attnmech.model.attention import attend
from attnmech.runs import total

TEXTS: Final = [
    torch.randint(3, 12, (20 - seed,), generator=torch.Generator().manual_seed(seed)).index_fill(0, torch.tensor(6), 13)
    for seed in (0, 1, 2, 3, 4, 0, 5)
]
"""Texts of several lengths, one of them twice, each with a full stop."""

QUESTIONS: Final[dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]] = {
    "focus": (am.attention_focus, {"last": 3}, {"last": 4}),
    "updates": (am.residual_updates, {}, {"layers": [1]}),
    "types": (am.head_types, {}, {"layers": [1]}),
    "alike": (am.redundancy, {"rows": 5}, {"rows": 4}),
    "odd heads": (am.odd_heads, {"beyond": 9}, {"beyond": 8}),
    "variance": (am.variance_shares, {}, {"centre": None}),
    "drift": (am.residual_drift, {"k": 5}, {"k": 4}),
    **{
        f"examples by {by}": (am.examples, {"by": by, "k": 3}, {"by": by, "k": 4})
        for by in ("attention", "value_weighted", "update", "next_token")
    },
    "segments": (am.segment_attention, {}, {"first": False}),
    "directions": (am.qk_directions, {"k": 2}, {"k": 3}),
    "tokens": (am.ov_tokens, {"k": 3}, {"k": 4}),
    "means": (am.mean_qk, {}, {"layers": [0]}),
    "means by position": (am.mean_qk, {"per_position": True}, {}),
}
"""Each question with its options, and with others whose results are not merged with these."""


@pytest.fixture(scope="module")
def model() -> am.HookedModel:
    return am.load(models.fresh("bloom", torch.float64), tokenizer=models.tokenizer())


def interrupted() -> Iterator[Tensor]:
    yield from TEXTS[:5]
    raise KeyboardInterrupt


@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize("name", QUESTIONS)
def test_any_way_of_running_gives_one_result(
    name: str, model: am.HookedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(total, "_JOURNAL_SHARE", 0.0)
    question, options, others = QUESTIONS[name]
    journal = tmp_path / "journal"
    whole = question(model, iter(TEXTS), **options)
    results = {"a list": question(model, TEXTS, **options)}
    with pytest.raises(KeyboardInterrupt):
        question(model, interrupted(), journal=journal, **options)
    with pytest.raises(JournalError, match="expected"):
        question(model, iter(TEXTS), journal=journal, **others)
    results["resumed"] = question(model, iter(TEXTS), journal=journal, **options)
    with monkeypatch.context() as patch:
        patch.setattr(attend, "block_bytes", lambda device: 1)
        results["blocks of 16 rows"] = question(model, iter(TEXTS), **options)
    if hasattr(whole, "merged"):
        first, *shards = (question(model, iter(TEXTS), shard=(k, 3), **options) for k in range(3))
        results |= {"merged": first.merged(*shards), "merged in another order": shards[1].merged(first, shards[0])}
        with pytest.raises(InputError, match=r"same model, layers, options|merged only with"):
            first.merged(question(model, iter(TEXTS), shard=(1, 3), **others))
    for way, result in results.items():
        pd.testing.assert_frame_equal(result.to_frame(), whole.to_frame(), rtol=1e-6, atol=1e-9, obj=f"{name}, {way}")
        if name.startswith("examples"):
            for key, value in whole.state.items():
                torch.testing.assert_close(result.state[key], value, rtol=1e-6, atol=1e-7, equal_nan=True, msg=key)
            assert result.halves().equals(whole.halves())
            for kind in KINDS:  # with the texts that each shard has kept
                columns = ["text", "position", "window"]
                assert result._table_of(kind)[columns].equals(whole._table_of(kind)[columns]), f"{way}, {kind}"
    assert not list(tmp_path.iterdir())
