"""An interrupted sweep resumes only if it is the same sweep, judged by its code and by its numbers."""

import contextvars
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import pandas as pd
import pytest
import torch
from counting import counted_passes
from torch import Tensor

import attnmech as am
from attnmech.errors import JournalError, OutputError
from attnmech.runs import engine
from attnmech.runs.journal import kept


def scaled(by: float) -> Callable[[Tensor, am.reducers.Batch], Tensor]:
    return lambda logits, batch: by * logits[:, -1, 0]


TEXTS = torch.randint(3, 50, (30, 9), generator=torch.Generator().manual_seed(0))


def break_off(monkeypatch: pytest.MonkeyPatch, after: int, **options: Any) -> None:
    """A sweep over the test's texts, interrupted after a number of groups of changes."""
    with monkeypatch.context() as patched:
        patched.setattr(engine, "step_tokens", lambda *_: TEXTS.numel())
        counted_passes(patched, after)
        with pytest.raises(KeyboardInterrupt):
            am.ablate_heads(models.hooked("gpt2"), TEXTS, **options)


def resumed(**options: Any) -> am.results.HeadEffects:
    return am.ablate_heads(models.hooked("gpt2"), TEXTS, **options)


def refused(path: Path, **options: Any) -> str:
    held = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        resumed(journal=path, **options)
    assert path.read_bytes() == held and list(path.parent.iterdir()) == [path]
    return str(caught.value)


ANSWERS: dict[str, Any] = {"metric": "logit_difference", "answers": [3] * 30, "against": [4] * 30}
PARTIAL: dict[str, Callable[..., Any]] = {
    "ablate_heads": partial(am.ablate_heads, shifts=True),
    "ablate_heads resample": partial(am.ablate_heads, metric="kl", method="resample"),
    "ablate_heads mean": partial(am.ablate_heads, method="mean", reference=TEXTS, **ANSWERS),
    "ablate_heads frozen": partial(am.ablate_heads, later="frozen"),
    "ablate_pairs": partial(am.ablate_pairs, pairs=[((0, 1), (2, 3)), ((0, 0), (1, 1))]),
    "null_attention": am.null_attention,
    "patch z": lambda model, texts, **options: am.patch(model, texts, texts.flip(1), metric=scaled(1.0), **options),
    "patch resid_pre": lambda model, texts, **options: am.patch(
        model, texts, texts.flip(1), at="resid_pre", metric=scaled(1.0), **options
    ),
    "sweep": partial(am.sweep, interventions=[am.Intervention.remove_keys([divmod(n, 5)], "first") for n in range(15)]),
    "prune_heads": partial(am.prune_heads, random=1, layers=[2]),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_ctrl_c_reaches_the_caller_unless_a_part_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, model, path = PARTIAL[name], models.hooked("gpt2"), tmp_path / "journal"
    whole = call(model, TEXTS)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "step_tokens", lambda *_: 1)
        # The first head disappears after the clean texts and five heads.
        passes = counted_passes(patched, 8 if name == "prune_heads" else 3)
        with pytest.raises(KeyboardInterrupt):
            call(model, TEXTS, journal=path)
        assert path.exists() and not list(tmp_path.glob(".*"))
        passes.clear()
        part = call(model, TEXTS, journal=path, partial=True)
        assert not part.complete and "stopped early" in repr(part) and path.exists()
    # Bounds of verdicts are applied afterwards.
    found = call(model, TEXTS, journal=path, **({"delta": 0.5} if name == "null_attention" else {}))
    assert found.complete and list(tmp_path.iterdir()) == []
    numbers, expected = (each.to_frame().select_dtypes("number") for each in (found, whole))
    pd.testing.assert_frame_equal(numbers, expected, rtol=1e-4, atol=1e-5)
    if getattr(whole, "shift", None) is not None:
        torch.testing.assert_close(found.shift, whole.shift, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_another_function_of_the_same_name_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    break_off(monkeypatch, 3, metric=scaled(1.0), journal=path)
    assert "code of the metric: expected" in refused(path, metric=scaled(2.0))
    assert "code of the metric: expected" in refused(path, metric=lambda logits, batch: logits[:, -1, 1])
    found = resumed(metric=scaled(1.0), journal=path)
    torch.testing.assert_close(found.after, resumed(metric=scaled(1.0)).after, rtol=1e-6, atol=1e-7)
    assert list(tmp_path.iterdir()) == []


def test_another_hook_at_the_same_point_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hooked = tmp_path / "journal", models.hooked("gpt2")

    def halved(by: float) -> Callable[[Tensor], Tensor]:
        return lambda z: z * by

    with hooked.hooks({("z", 1): halved(0.5)}):
        break_off(monkeypatch, 3, journal=path)
    assert "hooks: expected" in refused(path)
    with hooked.hooks({("z", 1): halved(0.25)}):
        assert "code and values of the hooks: expected" in refused(path)
    with hooked.hooks({("z", 1): halved(0.5)}):
        assert resumed(journal=path).complete
    values = [am.results.Values({1: torch.full((1, 1, 5, 4), value)}, "the same words") for value in (0.5, 0.25)]
    with hooked.intervene(am.Intervention.replace([(1, 2)], values[0])):
        break_off(monkeypatch, 3, journal=path)
    with hooked.intervene(am.Intervention.replace([(1, 2)], values[1])):
        assert "interventions: expected" in refused(path)


class Hidden:
    """A metric with a state that no digest covers."""

    def __init__(self) -> None:
        self.by = 1.0

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("no copy")

    def __call__(self, logits: Tensor, batch: am.reducers.Batch) -> Tensor:
        return self.by * logits[:, -1, 0]


@pytest.mark.parametrize("memory", [1.0, 3e-4])
def test_the_first_texts_are_measured_again(memory: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hidden = tmp_path / "journal", Hidden()
    break_off(monkeypatch, 4, metric=hidden, journal=path)
    hidden.by = 1.01
    said = refused(path, metric=hidden, memory=memory)
    assert re.search(
        r"disagrees with this run: the Hidden of text \d+ \(nothing changed\) is \S+ in the journal, but \S+ now\. The "
        r"metric, a hook or the model has changed, or is random\.",
        said,
    )
    hidden.by = 1.0
    found = resumed(metric=hidden, journal=path, memory=memory)
    assert found.complete and not path.exists()
    torch.testing.assert_close(found.after, resumed(metric=hidden).after, rtol=1e-5, atol=1e-5)


def test_what_changes_only_the_changed_run_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that acts only on copies leaves the clean numbers unchanged."""
    path, hooked = tmp_path / "journal", models.hooked("gpt2")

    class OnCopies(Hidden):
        def __call__(self, z: Tensor) -> Tensor:  # type: ignore[override]
            return z * self.by if len(z) > len(TEXTS) else z

    hook = OnCopies()
    monkeypatch.setattr("attnmech.runs.engine.step_tokens", lambda *_: 3 * TEXTS.numel())
    with hooked.hooks({("z", 2): hook}):
        break_off(monkeypatch, 2, journal=path)
        hook.by = 1.5
        assert "(z of L0H0 becomes 0) is" in refused(path)


def test_another_run_under_way(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    read: list[int] = []

    def reference() -> Iterator[Tensor]:
        read.append(1)
        yield TEXTS

    with kept(path), pytest.raises(JournalError, match="is in use by another run"):
        # Outside the block's context, as in another thread.
        contextvars.Context().run(partial(resumed, journal=path, method="mean", reference=reference()))
    assert not read, "it is refused before any work"
    with pytest.raises(OutputError, match="there is no folder"):
        resumed(journal=tmp_path / "no" / "journal", method="mean", reference=reference())
    assert not read
