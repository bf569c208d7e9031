"""Metrics of classifiers and of a user's own modules, against transformers' own models; names of a user's functions."""

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from by_hand import z_changed, zeroed
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.batch import Batch
from attnmech.errors import InputError

SIZES = {
    "vocab_size": 59, "hidden_size": 21, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 26,
    "max_position_embeddings": 23, "num_labels": 5,
}  # fmt: skip
IDS = [torch.tensor(row) for row in ([3, 7, 8, 9, 10, 41], [4, 5, 6], [9, 50, 2, 31, 17, 5, 6, 7, 8])]
LABELS = [2, 0, 4]


def plain_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    if kind.startswith("GPT2"):
        config = transformers.GPT2Config(
            vocab_size=53, n_positions=19, n_embd=20, n_layer=2, n_head=5, n_inner=28, num_labels=5, pad_token_id=0
        )
    else:
        config = transformers.BertConfig(**SIZES)
    made = models.randomised(getattr(transformers, kind)(config), dtype=dtype)
    made.set_attn_implementation("eager")
    return made


def surprise(logits: Tensor, label: int) -> Tensor:
    return -(logits.double()[label] - logits.double().logsumexp(0))


KINDS = ["BertForSequenceClassification", "GPT2ForSequenceClassification"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_class_without_a_head(kind: str, dtype: torch.dtype) -> None:
    model, plain = am.load(plain_of(kind, dtype)), plain_of(kind, dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    found = am.ablate_heads(model, iter(IDS), metric="cross_entropy", answers=LABELS)
    whole = am.ablate_heads(model, iter(IDS), metric="kl")
    right = am.ablate_heads(model, iter(IDS), metric="accuracy", answers=LABELS)
    for number, (ids, label) in enumerate(zip(IDS, LABELS, strict=True)):
        with torch.no_grad():
            clean = plain(ids[None]).logits[0]
            torch.testing.assert_close(found.before[number], surprise(clean, label), **close)
            assert float(right.before[number]) == float(clean.argmax() == label)
            for layer, head in ((0, 1), (1, 2)):
                with z_changed(plain, layer, zeroed(head)):
                    now = plain(ids[None]).logits[0]
                torch.testing.assert_close(found.after[layer, head, number], surprise(now, label), **close)
                p, q = clean.double().softmax(0), now.double().softmax(0)
                torch.testing.assert_close(whole.after[layer, head, number], (p * (p / q).log()).sum(), **close)
    assert "nats of cross-entropy" in found.lead and "nats of KL" in whole.lead


@pytest.mark.parametrize("kind", ["BertForTokenClassification", "GPT2ForTokenClassification"])
def test_classes_of_tokens_leave_out_padding_and_what_is_marked(kind: str) -> None:
    model, plain = am.load(plain_of(kind, torch.float64)), plain_of(kind, torch.float64)
    answers = torch.randint(0, 5, (3, 9), generator=torch.Generator().manual_seed(0))
    answers[0, 1] = answers[2, 0] = -100
    found = am.ablate_heads(model, iter(IDS), [(1, 1)], metric="cross_entropy", answers=answers)
    hits = am.ablate_heads(model, iter(IDS), [(1, 1)], metric="accuracy", answers=answers)
    for number, ids in enumerate(IDS):
        with torch.no_grad(), z_changed(plain, 1, zeroed(1)):
            logits = plain(ids[None]).logits[0]
        places = [place for place in range(len(ids)) if answers[number, place] != -100]
        values = [surprise(logits[place], int(answers[number, place])) for place in places]
        torch.testing.assert_close(found.after[1, 1, number], torch.stack(values).mean(), rtol=1e-11, atol=1e-11)
        share = sum(int(logits[place].argmax()) == int(answers[number, place]) for place in places) / len(places)
        assert float(hits.after[1, 1, number]) == pytest.approx(share)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_of_every_metric_with_a_gradient(kind: str) -> None:
    """−dL/dε with a head's z multiplied by 1 + ε, by finite differences on transformers' model."""
    model, plain = am.load(plain_of(kind, torch.float64)), plain_of(kind, torch.float64)
    targets = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def margin(logits: Tensor, batch: Batch) -> Tensor:
        assert batch.answers is not None
        return logits[range(len(logits)), batch.answers] - logits.mean(dim=1)

    by_hand: dict[str, tuple[Any, Any, Any]] = {
        "cross_entropy": ("cross_entropy", LABELS, lambda row, n: surprise(row, LABELS[n])),
        "mse": ("mse", targets, lambda row, n: (row - targets[n]).square().mean()),
        "margin": (margin, LABELS, lambda row, n: row[LABELS[n]] - row.mean()),
    }
    for name, (metric, answers, expected) in by_hand.items():
        found = am.head_importance(model, iter(IDS), method="zero", metric=metric, answers=answers)
        assert found.metric == name
        for number, ids in enumerate(IDS):
            values = []
            for step in (1e-5, -1e-5):

                def scaled(z: Tensor, step: float = step) -> Tensor:
                    z[..., 1, :] *= 1 + step
                    return z

                with torch.no_grad(), z_changed(plain, 1, scaled):
                    values.append(float(expected(plain(ids[None]).logits[0], number)))
            assert float(found.per_text[1, 1, number]) == pytest.approx((values[1] - values[0]) / 2e-5, abs=1e-7)
    for metric, said in (("accuracy", 'metric="accuracy" is a step function'), ("kl", "its gradient there is 0")):
        refuses(f"{said}.*cross_entropy", am.head_importance, model, iter(IDS), metric=metric, answers=LABELS)

    def whole(logits: Tensor, batch: Batch) -> Tensor:
        return logits.argmax(dim=-1).double()

    with pytest.raises(InputError, match=r"the metric whole has no gradient: .* computed from the logits"):
        am.head_importance(model, iter(IDS), metric=whole)


def test_what_classes_may_be_is_said() -> None:
    model = am.load(plain_of("BertForSequenceClassification"))
    for answers, said in (
        ([2, 0, 5], r"classes from 0 to 4, or -100 .*; got 5"),
        (torch.tensor([0.5, 1.0, 2.0]), r"class numbers \[3\] for an output \[3, 5\]"),
        ([2, 0], "a row for each of the 3 texts"),
    ):
        refuses(said, am.ablate_heads, model, torch.stack([IDS[1]] * 3), metric="cross_entropy", answers=answers)
    refuses(r"`metric` of a classifier must be one of .*'cross_entropy'.*'kl'", am.ablate_heads, model, iter(IDS))
    with pytest.raises(InputError, match="a classifier does not predict tokens"):
        am.ablate_heads(model, iter(IDS), metric="accuracy", answers=LABELS, against=LABELS)
    with pytest.raises(InputError, match="has no head that predicts either"):
        am.load(plain_of("GPT2ForSequenceClassification")).loss(torch.stack([IDS[1]]))


def test_segments_of_a_classified_text() -> None:
    for kind in KINDS:
        found = am.segment_effects(am.load(plain_of(kind)), IDS[2], [(0, 3), (3, 7), (7, 9)])
        assert (
            found.loss is None
            and "nats of KL (" in found.lead
            and "of loss" not in found.lead
            and "nan" not in found.lead
        )
    found = am.segment_effects(models.hooked("gpt2"), IDS[2], [(0, 8), (8, 9)])
    # No token follows the last one, so its loss is undefined.
    assert "nats of KL per later token (" in found.lead and "nan" not in found.lead


def test_a_lambda_has_no_name(tmp_path: Path) -> None:
    found = am.ablate_heads(models.hooked("gpt2"), iter(IDS), metric=lambda logits, batch: logits[:, 0, 5])
    assert found.metric == "metric" and found.provenance.options["metric"] == "metric"
    page = found.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;lambda" not in page and "<lambda" not in page and "lambda" not in found.lead
    with pytest.raises(InputError, match="the metric must return one number"):
        am.ablate_heads(models.hooked("gpt2"), iter(IDS), metric=lambda logits, batch: logits)


def test_a_task_may_be_of_classes() -> None:
    task = am.Task("labels", [(tuple(ids.tolist()), label, None, f"{n}") for n, (ids, label) in enumerate(
        zip(IDS, LABELS, strict=True))], metric="cross_entropy")  # fmt: skip
    assert not task.higher
    model = am.load(plain_of("BertForSequenceClassification"))
    found = am.ablate_heads(model, task.inputs, [(0, 0)], metric=task.metric, answers=task.answers)
    expected = am.ablate_heads(model, iter(IDS), [(0, 0)], metric="cross_entropy", answers=LABELS)
    assert torch.equal(found.before, expected.before)
