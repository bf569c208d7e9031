"""Numbers checkpoint by checkpoint are those of each checkpoint alone."""

from pathlib import Path

import models
import numpy as np
import pytest

import attnmech as am


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
            assert run.of(name)[place].numpy() == pytest.approx(alone[name].to_numpy(), abs=1e-6)
    frame = run.to_frame()
    assert frame.step.tolist() == ["step-000"] * len(run.layers) + ["step-008"] * len(run.layers)
    assert frame[frame.step == "step-008"].entropy.to_numpy() == pytest.approx(run.of("entropy")[1].numpy())
    again = am.Trajectory.load(run.save(tmp_path / "run.safetensors"))
    assert np.array_equal(again.values.numpy(), run.values.numpy(), equal_nan=True) and again.columns == run.columns
    run.to_html(tmp_path / "run.html")
    named = [trace.name for trace in run.plot("entropy").data if trace.showlegend]
    change = (run.of("entropy")[1] - run.of("entropy")[0]).abs()
    assert named[-1] == f"L{run.layers[int(change.argmax())]}H{run.heads[int(change.argmax())]}"


def test_models_and_names_may_be_given() -> None:
    ids = models.token_ids("bloom")
    ready = am.load(models.fresh("bloom", seed=1))
    run = am.trajectory(
        [("before", models.fresh("bloom")), ("after", ready)], lambda model: am.attention_focus(model, ids)
    )
    assert run.steps == ("before", "after")
    assert "2 checkpoints, before to after" in run.lead


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    ids = models.token_ids("bloom").clamp(max=40)

    def focus(model: am.HookedModel) -> am.AttentionFocus:
        return am.attention_focus(model, ids)

    with pytest.raises(am.InputError, match="other layers or heads"):
        am.trajectory([models.fresh("bloom"), models.fresh("gpt2")], focus)
    with pytest.raises(am.AttnmechError, match="nowhere"):
        am.trajectory([tmp_path / "nowhere"], focus)
    with pytest.raises(am.InputError, match="a list of folders or models"):
        am.trajectory([], focus)
    with pytest.raises(am.InputError, match="must return a result"):
        am.trajectory([models.fresh("bloom")], lambda model: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(am.InputError, match="one row per head"):
        am.trajectory([models.fresh("bloom")], lambda model: am.mean_qk(model, ids, by="position"))
