"""Advice on pruning: costs against plain forward passes, planted copies, and halves that share no text."""

import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError
from attnmech.methods.likeness.halves import halves


def texts(count: int = 16, length: int = 13, seed: int = 0) -> list[Tensor]:
    """Token ids of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 40, (1, length - number % 5), generator=generator) for number in range(count)]


def copied(pattern: Tensor) -> Tensor:
    """Heads 1 and 4 attend as head 2 does."""
    found = pattern.clone()
    found[:, [1, 4]] = pattern[:, 2:3]
    return found


def idle() -> am.HookedModel:
    """A model in which head 4 of layer 1 writes almost nothing, whatever it attends to."""
    model = models.fresh("gpt2")
    with torch.no_grad():
        rows = model.transformer.h[1].attn.c_proj.weight
        rows[4 * 4 : 4 * 5] *= 1e-4
    return am.load(model)


def rows_of(batches: list[am.reducers.Batch]) -> list[tuple[int, ...]]:
    return [tuple(ids[mask].tolist()) for each in batches for ids, mask in zip(each.ids, each.mask, strict=True)]


def loss(model: am.HookedModel, ids: Tensor, heads: list[tuple[int, int]]) -> float:
    """Cross-entropy of the next token, by hand."""

    def without(layer: int) -> Any:
        def edited(z: Tensor) -> Tensor:
            z = z.clone()
            z[:, :, [head for of, head in heads if of == layer]] = 0.0
            return z

        return edited

    with model.hooks({("z", layer): without(layer) for layer in {layer for layer, _ in heads}}):
        logits = model.run(ids).logits
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]))


def test_costs_are_those_of_plain_passes() -> None:
    model, given = idle(), texts(12)
    with model.hooks({("pattern", 1): copied}):
        advice = am.pruning_advice(model, given, threshold=1e-4, rows=5)
        forming, checking = (rows_of(side) for side in halves(model, given))
        (removed,), (repeats,) = advice.removed, advice.repeats
        assert advice.clusters == (((1, 1), (1, 2), (1, 4)),)
        assert removed == (1, 4) and repeats in ((1, 1), (1, 2)) and float(advice.divergence) == pytest.approx(0)
        assert advice.forming == len(forming) == 6 and len(checking) == len(advice.before) == 6
        clean = {ids: loss(model, torch.tensor([ids]), []) for ids in {*forming, *checking}}
        cost = [loss(model, torch.tensor([ids]), [removed]) - clean[ids] for ids in checking]
        assert sorted(advice.cost[0].tolist()) == pytest.approx(sorted(cost), abs=1e-5)
        others = [
            sum(loss(model, torch.tensor([ids]), [(1, head)]) for head in range(4)) / 4 - clean[ids] for ids in checking
        ]
        assert float(advice.control.mean()) == pytest.approx(sum(others) / len(others), abs=1e-5)
        # The head of the cluster that costs least on the texts that form the advice.
        formed = {
            head: sum(loss(model, torch.tensor([ids]), [(1, head)]) - clean[ids] for ids in forming)
            for head in (1, 2, 4)
        }
        assert min(formed, key=lambda head: formed[head]) == 4
        assert float(advice.formed.mean()) == pytest.approx(formed[4] / len(forming), abs=1e-5)
    assert advice.verdict == ("holds",)
    assert (
        advice.lead.startswith("Removing L1H4, which repeats L1H")
        and "The advice, formed on 6 texts, holds" in advice.lead
    )
    frame = advice.to_frame().iloc[0]
    assert frame["cost"] == pytest.approx(float(advice.cost.mean())) and frame["verdict"] == "holds"


def test_advice_that_attends_alike_but_matters_fails() -> None:
    """Both heads attend alike, but the loss needs what each writes: following the advice refutes it."""
    advice = am.pruning_advice(models.demo(), documents(16), threshold=0.4, tolerance=1e-4, layers=[1], most=3)
    assert "fails" in advice.verdict or "undecided" in advice.verdict
    low, high = advice.simultaneous()
    for each, bottom, top in zip(advice.verdict, low.tolist(), high.tolist(), strict=True):
        assert each == ("holds" if top <= 1e-4 else "fails" if bottom > 1e-4 else "undecided")


def test_no_text_is_in_both_halves() -> None:
    model, given = am.load(models.fresh("bloom")), texts(9)
    doubled = [*given, given[2], given[5], given[2]]
    forming, checking = (rows_of(side) for side in halves(model, doubled))
    assert not set(forming) & set(checking)
    assert sorted(forming + checking) == sorted(tuple(ids[0].tolist()) for ids in doubled)
    assert len(set(forming)) == 4 and len(set(checking)) == 5
    again = [rows_of(side) for side in halves(model, doubled)]
    assert again == [forming, checking]
    other = rows_of(halves(model, doubled, seed=1)[0])
    assert set(other) != set(forming)
    # The halves depend only on the texts, not on their order.
    assert set(rows_of(halves(model, doubled[::-1])[0])) == set(forming)
    with pytest.raises(InputError, match=r"at least two different texts are needed, .*; got one"):
        halves(model, [given[0], given[0]])


def test_few_texts_have_no_interval_and_say_so() -> None:
    advice = am.pruning_advice(models.demo(), documents(6), layers=[0], rows=8)
    assert advice.verdict == ("not tested",) and math.isnan(advice.to_frame().cost_low[0])
    assert "3 texts are too few for an interval" in advice.lead and "[" not in advice.lead


def test_heads_that_differ_are_not_advised(tmp_path: Path) -> None:
    """Random heads that see only content do not attend alike."""
    advice = am.pruning_advice(am.load(models.fresh("llama")), texts())
    assert advice.removed == () and advice.to_frame().empty
    assert "so no head is advised for removal" in advice.lead and advice.closest > 0.05
    assert am.load_result(advice.save(tmp_path / "none.safetensors")).lead == advice.lead
    advice.write_html(tmp_path / "none.html")


def test_the_mean_replaces_a_head_and_results_come_back(tmp_path: Path) -> None:
    model, given = models.demo(), documents(24)
    zero, mean = (am.pruning_advice(model, given, threshold=0.1, method=method) for method in ("zero", "mean"))
    assert mean.removed and not torch.equal(zero.cost.mean(), mean.cost.mean())
    side, other = halves(model, given)
    reference = am.mean_z(model, iter(side))
    effects = am.ablate_heads(model, iter(other), list(mean.removed), "mean", reference=reference)
    for number, (layer, head) in enumerate(mean.removed):
        assert float(mean.cost[number].mean()) == pytest.approx(float(effects.effect[layer, head]), abs=1e-6)
    loaded = am.load_result(mean.save(tmp_path / "advice.safetensors"))
    assert loaded.to_frame().equals(mean.to_frame()) and loaded.sentences == mean.sentences
    page = mean.write_html(tmp_path / "advice.html").read_text(encoding="utf-8")
    assert "Pruning advice and its check" in page and "random head of its layer" in page
    assert mean.provenance.options["forming"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "`threshold` must be a finite number above 0"),
        ({"tolerance": "small"}, "`tolerance` must be"),
        ({"most": 0}, "`most` must be a whole number, 1 or more"),
        ({"method": "resample"}, "`method` must be one of zero, mean"),
        ({"layers": [9]}, "9"),
        ({"seed": -1}, "`seed` must be"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.pruning_advice(models.demo(), documents(4), **options)


@pytest.mark.parametrize("name", ["bert_headless", "vit"])
def test_a_model_that_predicts_no_tokens_is_refused(name: str) -> None:
    message = r"loss on next or masked tokens, which \w+ does not predict; use am\.redundancy"
    with pytest.raises(InputError, match=message):
        am.pruning_advice(models.hooked(name), [])
