"""Warnings point at the user's line; one thing is singular."""

import re
from typing import Any

import models
import pytest
import transformers

import attnmech as am
from attnmech.basics.messages import warn_user


def test_a_warning_points_at_the_line_outside_the_package() -> None:
    within: dict[str, Any] = {"__name__": "attnmech.runs.deep", "warn": warn_user.__wrapped__}  # type: ignore[attr-defined]
    exec("def inner(): warn('Mind the gap.', FutureWarning)\ndef call(): inner()", within)
    with pytest.warns(FutureWarning, match="Mind the gap") as record:
        within["call"]()
    assert record[0].filename == __file__


def test_one_thing_is_singular() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32, vocab_size=40)
    model, ids = (
        am.load(transformers.GPT2LMHeadModel(config)),
        models.token_ids("gpt2", batch=1, length=7).clamp(max=39),
    )
    results = (
        am.attention_focus(model, ids), am.residual_updates(model, ids), am.null_attention(model, ids),
        am.ablate_heads(model, ids), am.head_importance(model, ids), am.examples(model, ids), am.head_types(model, ids),
        am.odd_heads(model, ids), am.prune_heads(model, ids), am.joint_embedding(model, ids),
        am.trajectory([model, model], lambda model: am.attention_focus(model, ids)),
        am.compare(model, model, ids, am.attention_focus),
    )  # fmt: skip
    sentences = [repr(model), *map(repr, results), *(result.lead for result in results)]
    assert [text for text in sentences if re.search(r"\b1 (heads|layers|texts|tokens|measurements)\b", text)] == []
