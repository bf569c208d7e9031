"""`python on_device.py FOLDER DEVICES KIND ...`: what small models give on the CPU and on devices without hardware.

DEVICES is one, or two with a comma between them, over which accelerate splits the model. The path holds `tests/`.
Prints a line of JSON per model: its type, and the largest difference of every result, relative to its largest value.
The first model is reported too and, if split over the CPU and another device, differentiated, continued and patched.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerate
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


def further(of: Subject) -> dict[str, dict[str, Tensor]]:
    """Gradients, generation and patching."""
    point, name = "z", of.model.output_stack.point("z")
    gradients = of.model.run(of.text, points=[name], gradients_of=lambda logits: logits.sum()).gradients
    assert gradients is not None
    written = of.model.generate(of.text, 2, points=[name])
    patched = am.patch(of.model, *of.pair, **of.judged)
    return {
        "gradients": {point: gradients[name]},
        "generate": {"ids": written.ids, "z": written.steps[-1][name]},
        "patch": {"effect": patched.effect},
    }


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where only one has a value."""
    one, other = (value.detach().cpu().double() for value in (one, other))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return torch.inf
    one, other = (value.nan_to_num(0.0, 0.0, 0.0) for value in (one, other))
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) if one.numel() else 0.0


def placed(raw: Any, devices: Sequence[str]) -> Any:
    """The model on one device, or split over two as `device_map="auto"` does: blocks are whole."""
    if len(devices) == 1:
        raw.to(devices[0])
        raw.tie_weights()  # a parameter that is moved there is made anew
        return raw
    most = int(0.6 * sum(parameter.nbytes for parameter in raw.parameters()))
    whole = raw._no_split_modules
    numbers = accelerate.infer_auto_device_map(raw, {0: most, 1: 4 * most}, no_split_module_classes=whole)
    places = {name: devices[number] for name, number in numbers.items()}
    raw = accelerate.dispatch_model(raw, places, main_device="cpu" if "cpu" in devices else None)
    assert {str(parameter.device) for parameter in raw.parameters()} == set(devices), places
    return raw


def compared(make: Callable[[], Any], folder: Path, devices: Sequence[str], *, reported: bool) -> dict[str, float]:
    """The differences of one model's results."""
    of, of_placed = Subject(make(), folder), Subject(placed(make(), devices), folder)
    expected, found = measured(of, reported=False), measured(of_placed, reported=reported)
    if reported and "cpu" in devices:  # torch's engine of gradients knows one device of this kind
        expected |= further(of)
        found |= further(of_placed)
    return {
        f"{call} {name}": difference(value, expected[call][name])
        for call, values in found.items()
        for name, value in values.items()
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    fake_device.install()
    folder, devices, *kinds = sys.argv[1:]
    for kind in kinds:
        differences = compared(models_of_all()[kind], Path(folder), devices.split(","), reported=kind == kinds[0])
        print(json.dumps([kind, differences]), flush=True)
    os._exit(0)  # torch ends before Python does, and would call back into it
