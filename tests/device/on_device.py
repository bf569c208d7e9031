"""`python on_device.py FOLDER KIND ...`: what each small model gives on the CPU and on a device without hardware.

The path holds `tests/`. Prints a line of JSON per model: its type, and the largest difference of every result, relative
to its largest value. The first model is reported too.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device
import torch
from matrix import Subject, models_of_all
from torch import Tensor

import attnmech as am


def measured(of: Subject, *, reported: bool) -> dict[str, dict[str, Tensor]]:
    """The first column of the matrix: load, certificate, run, focus, updates, ledgers, ablations; a report's page."""
    model, stack = of.model, of.model.output_stack
    assert model.certificate.ok, model.certificate.verdict
    here = {} if len(model.stacks) == 1 else {"stack": stack.label}
    points = [stack.point("pattern"), stack.point("v")]
    acts = model.run(of.text, points=[*points, "logits"])
    acts.show(points[0], layer=stack.layers[0], weighted="value")
    focus = am.attention_focus(model, of.text, **here)
    updates = am.residual_updates(model, of.text, **here)
    split = am.decompose_scores(model, of.text, centre="mean", **here)
    kernel = split.position_kernel()
    effects = am.ablate_heads(model, of.few, of.heads, metric=of.metric)
    for result in (focus, updates, split, effects):
        result.plot()
        result.save(of.folder / "result.safetensors")
    kernel.plot(stack.layers[0], 1)
    if reported:
        assert "<html" in am.report(model, of.text).to_html()
    with model.intervene(am.Intervention.attend(of.heads, "uniform", **here)):
        edited = model.run(of.text, points=["logits"])
    found = {
        "run": {"logits": acts.logits, "pattern": acts[points[0], stack.layers[-1]]},
        "focus": {name: focus.mean(name) for name in focus.STATISTICS},
        "updates": {name: updates.mean(name) for name in updates.STATISTICS},
        "ledger": dict(split.terms),
        "kernel": {"scores": kernel.values},
        "effects": {"effect": effects.effect},
        "intervene": {"logits": edited.logits},
    }
    if model.reads_tokens:
        drift = am.residual_drift(model, of.text, k=5, **here)
        drift.plot()
        found["drift"] = {name: drift.by_token(name) for name in ("cosine", "dot")}
    return found


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where only one has a value."""
    one, other = (value.detach().cpu().double() for value in (one, other))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return torch.inf
    one, other = (value.nan_to_num(0.0, 0.0, 0.0) for value in (one, other))
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) if one.numel() else 0.0


def compared(make: Callable[[], Any], folder: Path, *, reported: bool) -> dict[str, float]:
    """The differences of one model's results."""
    expected = measured(Subject(make(), folder), reported=False)
    raw = make().to(fake_device.NAME)
    raw.tie_weights()  # a parameter that is moved there is made anew
    found = measured(Subject(raw, folder), reported=reported)
    return {
        f"{call} {name}": difference(value, expected[call][name])
        for call, values in found.items()
        for name, value in values.items()
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    fake_device.install()
    for kind in sys.argv[2:]:
        differences = compared(models_of_all()[kind], Path(sys.argv[1]), reported=kind == sys.argv[2])
        print(json.dumps([kind, differences]), flush=True)
    os._exit(0)  # torch ends before Python does, and would call back into it
