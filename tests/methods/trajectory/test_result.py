"""The numbers of a trajectory equal those of each checkpoint alone."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import attnmech as am


@pytest.mark.core
def test_each_step_is_the_result_of_its_own_model(tmp_path: Path) -> None:
    folders = []
    for step in (0, 8):
        folder = tmp_path / f"step-{step:03d}"
        models.fresh("llama", seed=step).save_pretrained(folder)
        folders.append(folder)
    ids = models.token_ids("llama")
    run = am.trajectory(folders, lambda model: am.attention_focus(model, ids))
    assert run.steps == ("step-000", "step-008") and len(set(run.weights)) == 2
    for place, step in enumerate((0, 8)):
        alone = am.attention_focus(am.load(models.fresh("llama", seed=step)), ids).to_frame()
        for name in ("first_top", "entropy"):
            assert run[name][place].numpy() == pytest.approx(alone[name].to_numpy(), abs=1e-6)
    frame = run.to_frame()
    assert frame.step.tolist() == ["step-000"] * len(run.layers) + ["step-008"] * len(run.layers)
    assert frame[frame.step == "step-008"].entropy.to_numpy() == pytest.approx(run["entropy"][1].numpy())
    named = [trace.name for trace in run.plot("entropy").data if trace.showlegend]
    change = (run["entropy"][1] - run["entropy"][0]).abs()
    assert named[-1] == f"L{run.layers[int(change.argmax())]}H{run.heads[int(change.argmax())]}"
    name = run.columns[0]
    first = run[name]
    most = max(range(len(run.layers)), key=lambda row: abs(float(first[1, row] - first[0, row])))
    one, two = (f"{float(first[step, most]):.3g}" for step in (0, 1))
    change = f"changes most in L{run.layers[most]}H{run.heads[most]}, from {one} (step-000) to {two} (step-008)."
    assert run.lead.endswith(f"2 checkpoints, step-000 to step-008: {name.replace('_', ' ')} {change}")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    ids = models.token_ids("bloom").clamp(max=40)

    def focus(model: am.HookedModel) -> am.results.AttentionFocus:
        return am.attention_focus(model, ids)

    one = [models.hooked("bloom")]
    cases: list[tuple[Any, Any, str]] = [
        ([*one, models.hooked("gpt2")], focus, "different layers or heads"),
        ([tmp_path / "nowhere"], focus, "checkpoint 0, .*nowhere: "),
        ([("a",)], focus, "checkpoint 0 must be"),
        ([], focus, "a list of folders or models"),
        (one, lambda model: 3, "must return an attnmech result"),
        (one, lambda model: am.mean_qk(model, ids, per_position=True), "one row per head"),
    ]
    for checkpoints, measure, message in cases:
        with pytest.raises(am.AttnmechError, match=message):
            am.trajectory(checkpoints, measure)


def test_an_iterator_holds_one_model_at_a_time() -> None:
    ids, alive = models.token_ids("bloom"), []

    def checkpoints() -> Iterator[am.HookedModel]:
        for seed in range(3):
            gc.collect()
            assert not [each for each in alive if each() is not None]
            model = am.load(models.fresh("bloom", seed=seed))
            alive.append(weakref.ref(model))
            yield model
            del model

    run = am.trajectory(checkpoints(), lambda model: am.attention_focus(model, ids))
    assert len(run.steps) == 3
    given = [("before", models.fresh("bloom")), ("after", models.hooked("bloom"))]
    run = am.trajectory(given, lambda model: am.attention_focus(model, ids))
    assert run.steps == ("before", "after") and "2 checkpoints, before to after" in run.lead


def test_a_column_that_the_first_step_lacks_is_kept() -> None:
    """The first checkpoint is measured without repetition, the second with: first NaN, then numbers."""
    ids = iter([torch.arange(3, 12)[None], torch.arange(3, 12).repeat(2)[None]])
    run = am.trajectory([models.fresh("bloom"), models.fresh("bloom")], lambda model: am.head_types(model, next(ids)))
    assert bool(run["induction"][0].isnan().all()) and bool(run["induction"][1].isfinite().all())


def test_names_that_two_checkpoints_share_are_told_apart(tmp_path: Path) -> None:
    ids, folders = models.token_ids("bloom"), [tmp_path / step / "model" for step in ("0", "1")]
    for folder in folders:
        models.fresh("bloom").save_pretrained(folder)
    run = am.trajectory(folders, lambda model: am.attention_focus(model, ids))
    assert run.steps == ("model", "model, 1")
    assert "at one checkpoint, model." in am.trajectory(folders[:1], lambda model: am.attention_focus(model, ids)).lead
