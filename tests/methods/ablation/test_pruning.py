"""Greedy pruning equals brute force on the raw transformers model, and resumes where it was interrupted."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, divergences, logit_differences, losses, z_changed, zeroed
from comparing import refuses
from counting import counted_passes
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError, JournalError

Head = tuple[int, int]


def judged(name: str, metric: str, gone: list[Head]) -> Tensor:
    """The metric of each text on the raw model with z of some heads at 0."""
    plain, ids = models.plain(name), models.token_ids(name)
    with torch.no_grad():
        clean = plain(ids).logits
        with ExitStack() as until:
            for layer, head in gone:
                until.enter_context(z_changed(plain, layer, zeroed(head)))
            logits = plain(ids).logits
    if metric == "loss":
        return losses(logits, ids, [7] * 3)
    if metric == "kl":
        return divergences(logits, clean, [7] * 3)
    return logit_differences(logits, ANSWERS, AGAINST)


def brute_force(name: str, metric: str, heads: list[Head], steps: int) -> list[tuple[Head, Tensor]]:
    gone: list[Head] = []
    found = []
    sign = -1 if metric == "logit_difference" else 1
    for _ in range(steps):
        tried = {head: judged(name, metric, [*gone, head]) for head in heads if head not in gone}
        best = min(tried, key=lambda head: sign * float(tried[head].mean()))
        gone.append(best)
        found.append((best, tried[best]))
    return found


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "metric", "steps"),
    [("bloom", "loss", 6), ("gpt2", "logit_difference", 4), ("llama", "loss", 3), ("bert", "kl", 5)],
)
def test_equals_brute_force_on_the_raw_model(name: str, metric: str, steps: int) -> None:
    hooked = models.hooked(name)
    heads = [(layer, head) for layer in range(2) for head in range(hooked.n_heads)]
    options = JUDGED if metric == "logit_difference" else {}
    curve = am.prune_heads(
        hooked, models.token_ids(name), layers=[0, 1], steps=steps, metric=metric, random=2, **options
    )
    expected = brute_force(name, metric, heads, steps)
    assert curve.order == tuple(head for head, _ in expected)
    torch.testing.assert_close(curve.after, torch.stack([after for _, after in expected]), rtol=1e-3, atol=1e-5)
    before = judged(name, metric, [])
    torch.testing.assert_close(curve.before, before, rtol=1e-4, atol=1e-5)
    for order, values in zip(curve.random_orders, curve.random, strict=True):
        assert sorted(order) == heads
        for step in range(steps):
            after = judged(name, metric, list(order[: step + 1]))
            torch.testing.assert_close(values[step], after, rtol=1e-3, atol=1e-5)
    assert curve.complete
    mean = (torch.stack([after for _, after in expected]) - before).mean(dim=-1)
    torch.testing.assert_close(curve.effect, mean, rtol=1e-3, atol=1e-5)


def test_the_first_head_is_that_of_the_sweep_and_all_orders_end_alike() -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    reference = ids.flip(0).roll(1, dims=1)
    chosen = [(0, 4), (1, 5), (1, 0)]
    curve = am.prune_heads(hooked, ids, heads=chosen, method="mean", reference=reference, random=3)
    singles = am.ablate_heads(hooked, ids, chosen, "mean", reference=reference)
    best = min(chosen, key=lambda head: float(singles.effect[head]))
    assert curve.order[0] == best and sorted(curve.order) == sorted(chosen)
    torch.testing.assert_close(curve.after[0], singles.after[best], rtol=1e-5, atol=1e-6)
    for values in curve.random:
        torch.testing.assert_close(values[-1], curve.after[-1], rtol=1e-5, atol=1e-6)
    again = am.prune_heads(hooked, ids, heads=chosen, method="mean", reference=reference, random=3)
    assert again.random_orders == curve.random_orders
    assert len(set(am.prune_heads(hooked, ids, heads=chosen, random=6, seed=1).random_orders)) > 1


def test_a_function_of_ones_own_says_what_is_better() -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")

    def own(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
        return logits[:, -1, 7]

    low = am.prune_heads(hooked, ids, metric=own, higher_is_better=False, steps=1, random=0)
    high = am.prune_heads(hooked, ids, metric=own, higher_is_better=True, steps=1, random=0)
    singles = am.ablate_heads(hooked, ids, metric=own)
    assert float(low.effect[0]) == pytest.approx(float(singles.effect.min()), abs=1e-5)
    assert float(high.effect[0]) == pytest.approx(float(singles.effect.max()), abs=1e-5)
    assert low.random.shape == (0, 1, 3) and low.complete and low.to_frame()["random"].isna().all()
    refuses("needs `higher_is_better`", am.prune_heads, hooked, ids, metric=own)
    with pytest.raises(InputError, match="for loss, lower is better; leave `higher_is_better` out"):
        am.prune_heads(hooked, ids, higher_is_better=True)


def test_what_it_says_and_draws() -> None:
    ids = torch.randint(3, 50, (12, 9), generator=torch.Generator().manual_seed(0))
    curve = am.prune_heads(models.hooked("gpt2"), ids, layers=[2], random=4)
    frame = curve.to_frame()
    assert frame["removed"].tolist() == [1, 2, 3, 4, 5]
    assert list(zip(frame["layer"], frame["head"], strict=True)) == list(curve.order)
    drawn = curve.random.mean(dim=-1) - curve.before.mean()
    least, most = drawn.amin(dim=0), drawn.amax(dim=0)
    for name, expected in (("random", drawn.mean(dim=0)), ("random_least", least), ("random_most", most)):
        torch.testing.assert_close(torch.tensor(frame[name].to_numpy()), expected)
    assert repr(curve).startswith("PruningCurve(Zero ablation of the 3 least harmful of 5 heads on 12 texts: ")
    assert "chosen on the same texts" in repr(curve)
    *random, band, line = curve.plot().data
    assert len(random) == 4 and [trace.showlegend for trace in random] == [True, False, False, False]
    expected = [float(curve.before.mean()), *curve.after.mean(dim=-1).tolist()]
    assert list(line.y) == expected and line.text[0] == "none"
    assert list(random[2].y) == [expected[0], *curve.random[2].mean(dim=-1).tolist()]
    assert len(band.x) == 12
    alone = am.prune_heads(models.hooked("gpt2"), ids[:1], layers=[2], random=0, steps=2)
    assert len(alone.plot().data) == 1 and "in random order" not in repr(alone)


def test_another_call_or_metric_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the metric's code did not show the change."""
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    journal = tmp_path / "journal"

    def scaled(by: float) -> Any:
        return lambda logits, batch: by * logits[:, -1, 0]

    def prune(by: float, **options: Any) -> am.results.PruningCurve:
        options |= {"metric": scaled(by), "higher_is_better": True, "journal": journal}
        return am.prune_heads(hooked, ids, random=0, **options)

    monkeypatch.setattr("attnmech.runs.sweep.digest_of", lambda _: "same")
    with monkeypatch.context() as patched:
        counted_passes(patched, 5)
        with pytest.raises(KeyboardInterrupt):
            prune(1.0)
    held = journal.read_bytes()
    refuses("steps: expected 4", prune, 1.0, steps=4, error=JournalError)
    refuses(r"text \d with \d heads? ablated is .* in the journal, .* now", prune, 2.0, error=JournalError)
    assert journal.read_bytes() == held
    assert prune(1.0).complete and list(tmp_path.iterdir()) == []
