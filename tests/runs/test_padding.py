"""Padding on any side changes no result: positions, labels, means and donors are those of the texts' own tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import Tensor

import attnmech as am

LENGTHS = (9, 5, 7, 6, 8, 4)
JUDGED: dict[str, Any] = {"answers": [5] * len(LENGTHS), "against": [9] * len(LENGTHS)}


def padded(seed: int, side: str, width: int = 11) -> dict[str, Tensor]:
    """Texts in one batch, with the positions of their tokens."""
    ids, mask, places = torch.zeros(3, len(LENGTHS), width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        begin = {"right": 0, "left": width - length, "both": (width - length) // 2}[side]
        ids[row, begin : begin + length] = models.token_ids("gpt2", length=length, seed=seed + row)[0]
        mask[row, begin : begin + length], places[row, begin : begin + length] = 1, torch.arange(length)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places}


def last(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
    return logits[batch.at([-1])][:, 3]


HEADS: list[tuple[int, int]] = [(0, 1), (1, 2)]


def changes(means: am.results.Values) -> list[am.Intervention]:
    """Changes at positions and keys, which count each text's own tokens."""
    change = am.Intervention
    return [
        change.replace_values([(1, 2)], [1, -1], means),
        change.remove_keys("all", [1]),
        change.remove_keys(HEADS, "first", positions=[1, -1]),
        change.reweight(HEADS, [1, -2], 5.0),
        change.zero_values(HEADS, [1, -1]),
        change.zero("all", positions=[2, -1]),
        change.attend(HEADS, "uniform", positions=[1, -1]),
        change.add("k", {1: torch.ones(1, 1, 5, 4)}, heads=[(1, 2)], positions=[1]),
        change.stream("mlp_out", [1], positions=[-1, 1]),
    ]


CALLS: dict[str, Callable[..., Any]] = {
    "zero": lambda model, one, other: am.ablate_heads(model, one, metric=last),
    "mean": lambda model, one, other: am.ablate_heads(
        model, one, method="mean", reference=am.mean_z(model, other, per_position=True)
    ),
    "resample": lambda model, one, other: am.ablate_heads(model, one, method="resample"),
    "resample others": lambda model, one, other: am.ablate_heads(model, one, method="resample", reference=other),
    "importance": lambda model, one, other: am.head_importance(
        model, one, method="mean", reference=am.mean_z(model, other, per_position=True)
    ),
    "sweep": lambda model, one, other: am.sweep(model, one, changes(am.mean_z(model, other, per_position=True))),
    "patch": lambda model, one, other: am.patch(model, one, other, positions=[1, -2], **JUDGED),
    "pattern": lambda model, one, other: am.patch(model, one, other, at="pattern", positions=[3], **JUDGED),
    "attribute": lambda model, one, other: am.attribute(model, one, other, **JUDGED),
    "path": lambda model, one, other: am.path_patch(model, one, other, **JUDGED),
    "steer": lambda model, one, other: am.steer(
        model, {1: torch.ones(1, 1, model.d_model)}, one, at="resid_post", positions=[1]
    ),
    "direction": lambda model, one, other: am.mean_difference(model, one, other),
    "alike": lambda model, one, other: am.redundancy(model, one, rows=3),
    "embedded": lambda model, one, other: am.joint_embedding(model, one),
    "embedded exactly": lambda model, one, other: am.joint_embedding(model, one, geometry="exact"),
    "examples": lambda model, one, other: am.examples(model, one, by="value_weighted", k=3),
    "next tokens": lambda model, one, other: am.examples(model, one, by="next_token", k=3),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_result_does_not_depend_on_the_side_of_the_padding(call: str) -> None:
    model = models.hooked("gpt2")
    right, *others = (CALLS[call](model, padded(0, side), padded(50, side)) for side in ("right", "left", "both"))
    for result in others:
        if hasattr(result, "tokens"):
            assert result.tokens == right.tokens
        for name, column in right.to_frame().select_dtypes("number").items():
            if name not in ("agreeing", "low", "high"):
                np.testing.assert_allclose(result.to_frame()[name], column, rtol=2e-4, atol=2e-5, err_msg=str(name))


CIRCUIT = am.Circuit(nodes=("L0H1", "L0 MLP", "L1H3"))
TOGETHER: dict[str, Callable[..., Any]] = {
    "importance": lambda model, one, other, **options: am.head_importance(model, one, **options),
    "zero": lambda model, one, other, **options: am.head_importance(model, one, method="zero", **options),
    "null": lambda model, one, other, **options: am.null_attention(model, one, sink="most_attended", **options),
    "patch": partial(am.patch, positions="last", heads=[(1, 4), (0, 2)]),
    "pattern": partial(am.patch, at="pattern", positions="last", heads=[(1, 4), (0, 2)]),
    "path": partial(am.path_patch, receivers=[(1, 3)], through="k"),
    "gradient": partial(am.attribute, nodes="heads+mlps"),
    "integrated": partial(am.attribute, method="integrated"),
    "faithfulness": lambda model, *pairs, **options: am.faithfulness(model, CIRCUIT, *pairs, **options),
}


@pytest.mark.parametrize("call", TOGETHER)
def test_texts_of_several_lengths_have_what_each_has_alone(call: str) -> None:
    """In one pass, and with memory for one text at a time."""
    model, measured = models.hooked("llama"), TOGETHER[call]
    texts = [models.token_ids("llama", 1, length, seed=length)[0] for length in (9, 3, 14, 5)]
    others = [text.roll(2) for text in texts]
    answers = {} if call in ("importance", "zero", "null") else {"answers": [5], "against": [9]}
    options = {name: tokens * len(texts) for name, tokens in answers.items()}
    together = measured(model, iter(texts), iter(others), **options)
    memory = 3e-4 if call in ("null", "patch", "pattern", "path") else 1e-9
    apart = measured(model, texts, others, memory=memory, **options)
    for number, (text, other) in enumerate(zip(texts, others, strict=True)):
        alone = measured(model, text[None], other[None], **answers)
        for name in (name for name in alone.quantities if name != "mean_value"):  # the mean is that of all texts
            expected = alone[name].per_text[..., 0]
            assert expected.isfinite().any()
            for whole in (together, apart):
                torch.testing.assert_close(
                    whole[name].per_text[..., number], expected, rtol=1e-3, atol=1e-5, equal_nan=True
                )


def test_attention_that_a_position_receives_is_that_of_the_texts_tokens() -> None:
    model = models.hooked("gpt2")
    right, *others = (am.attention_focus(model, padded(0, side)) for side in ("right", "left", "both"))
    for focus in others:
        assert focus.sink_share() == right.sink_share() > 0
        for name in ("sink_rate", "received", "received_by_type"):
            value, longest = getattr(focus, name), getattr(right, name).shape[-1]
            torch.testing.assert_close(value[..., :longest], getattr(right, name), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_mean_by_position_covers_the_positions_of_tokens() -> None:
    model = models.hooked("gpt2")
    by_side = [am.mean_z(model, padded(0, side), per_position=True) for side in ("right", "left", "both")]
    texts = [ids[mask.bool()] for ids, mask in zip(*list(padded(0, "left").values())[:2], strict=True)]
    z = [model.run(ids[None], ["z"])["z", 1][0] for ids in texts]
    for place in range(max(LENGTHS)):
        mean = torch.stack([of_text[place] for of_text in z if len(of_text) > place]).double().mean(dim=0)
        for values in by_side:
            torch.testing.assert_close(values.by_layer[1][0, place].double(), mean, rtol=1e-5, atol=1e-6)
    assert {values.by_layer[1].shape[1] for values in by_side} == {max(LENGTHS)}


def test_tokens_of_a_text_are_named_by_their_position_in_it() -> None:
    model = models.hooked("gpt2")
    right, *others = (am.residual_drift(model, padded(0, side), k=5) for side in ("right", "left", "both"))
    for drift in others:
        for call in ("nearest", "pair"):
            frames = [getattr(result, call)(*((1, 3) if call == "nearest" else (0, 3, 1))) for result in (right, drift)]
            for name, column in frames[0].items():
                if name not in frames[1].select_dtypes("number"):
                    assert frames[1][name].tolist() == column.tolist()
                else:
                    np.testing.assert_allclose(frames[1][name], column, rtol=1e-4, atol=1e-5)
        names = ["text", "position", "token", "layer"]
        assert drift.tokens_frame()[names].equals(right.tokens_frame()[names])
    with pytest.raises(am.errors.InputError, match="all must begin at position 0"):
        am.decompose_by_source(model, padded(0, "left"), cells=[(3, 1)])
