"""Attention cut between two spans: rows without keys, transformers with a mask, and effects run by run."""

from pathlib import Path
from typing import Any

import models
import pytest
import torch

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError
from attnmech.interventions import Intervention
from attnmech.runs.sweep import run_sweep


def test_effects_are_those_of_single_runs() -> None:
    model = models.demo()
    text = documents(1, seed=3)[0]
    found = am.segment_effects(model, text)
    batch, starts = model.encode(text), found.starts
    clean = model.run(batch).logits[0].double().log_softmax(-1)
    targets = batch.ids[0, 1:]
    assert found.loss is not None and found.loss_from_later is not None
    for query, key in [(1, 0), (len(starts) - 2, 1), (None, 1)]:
        first = starts[2] if query is None else starts[query]
        last = starts[-1] if query is None else starts[query + 1]
        with model.intervene(Intervention.cut((first, last), (starts[key], starts[key + 1]))):
            now = model.run(batch).logits[0].double().log_softmax(-1)
        kl = (clean.exp() * (clean - now)).sum(-1)
        worse = -(now - clean)[:-1].gather(-1, targets[:, None])[:, 0]
        assert float(kl[:first].abs().max()) < 1e-9
        measured = (found.kl_from_later[key], found.loss_from_later[key])
        if query is not None:
            measured = found.kl[query, key], found.loss[query, key]
        assert float(measured[0]) == pytest.approx(float(kl[first:].mean()), rel=1e-3, abs=1e-6)
        assert float(measured[1]) == pytest.approx(float(worse[first:].mean()), rel=1e-3, abs=1e-5)


def test_beyond_the_budget_the_strongest_segments_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnmech.methods.segments import segment_effects as module

    monkeypatch.setattr(module, "STRONGEST", 1)
    model, text = models.demo(), documents(1, seed=3)[0]
    whole, some = am.segment_effects(model, text), am.segment_effects(model, text, budget=1e-9)
    said = capsys.readouterr().err
    assert said.index("pairs of segments: about") < said.index("more than 0 s, so only the pairs of 1 segments")
    best = int(whole.kl_from_later.nan_to_num(-1).argmax())
    measured = ~some.kl.isnan()
    assert set(measured.nonzero()[:, 1].tolist()) == {best}
    torch.testing.assert_close(some.kl[measured], whole.kl[measured], atol=1e-7, rtol=1e-4)


def test_interrupted_in_its_last_sweep_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.methods.segments import segment_effects as module

    model, text, calls = models.demo(), documents(1, seed=3)[0], []
    whole = am.segment_effects(model, text)

    def interrupted(*given: Any, **options: Any) -> Any:
        calls.append(options["journal"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_sweep(*given, **options)

    monkeypatch.setattr(module, "run_sweep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        am.segment_effects(model, text, journal=tmp_path / "cuts")
    assert len(set(calls)) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cuts.later.kl", "cuts.later.loss", "cuts.pairs.kl"]
    again = am.segment_effects(model, text, journal=tmp_path / "cuts")
    torch.testing.assert_close(again.kl, whole.kl, equal_nan=True)
    torch.testing.assert_close(again.loss, whole.loss, equal_nan=True)
    assert not list(tmp_path.iterdir())


def test_a_model_that_looks_ahead_has_kl_alone(tmp_path: Path) -> None:
    model, ids = models.hooked("bert"), models.token_ids("bert", 1)
    found = am.segment_effects(model, ids, [(0, 2), (2, 4), (4, 7)])
    assert found.loss is None and int((~found.kl.isnan()).sum()) == 6
    again = am.load_result(found.save(tmp_path / "found.safetensors"))
    torch.testing.assert_close(again.kl, found.kl, equal_nan=True)
    with pytest.raises(InputError, match='use "kl"'):
        found.plot("loss")
