"""`python on_device.py FOLDER FLOAT64 CALLS`: compares devices without hardware with the CPU on small models.

FLOAT64 is "float64", or "none" for devices that refuse that type. CALLS is a mapping in JSON: the names of calls
(`tests/matrix.py`) that a model makes, by its type, by devices: one, or two with a comma between them, over which
accelerate splits the model. The path holds `tests/` and `benchmarks/`. Prints a line of JSON per model: devices, type,
and the distance of every tensor of every result from the CPU's, in units of the tolerance.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import accelerate
import fake_device
import pandas as pd
import tiny
import torch
from matrix import CALLS, Subject, look, models_of_all, stacks_of
from measure import difference
from torch import Tensor

import attnmech as am

_OF_ROUNDING: Final = ("residual", "certificate", "tolerance")
"""Fields that hold rounding errors, which differ between any two computations."""
_RANKS: Final = ("matching", "copying")
"""Fields that rank values that may be equal up to rounding."""
_OF_LOSS: Final = ("segment_effects", "confirm_heads", "compare")
"""The calls without a `metric` whose results are differences of losses."""
_ROUNDINGS: Final = 8
"""The float32 roundings, of the largest logit, that a difference of two metrics may be off by."""


def numbers_of(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The numbers in a result and in the objects that it holds, by path."""
    if isinstance(result, Tensor):
        yield name, result.detach().cpu().double()
    elif isinstance(result, int | float):
        yield name, torch.tensor(float(result), dtype=torch.float64)
    elif isinstance(result, pd.DataFrame):
        yield from ((f"{name}.{key}", torch.tensor(result[key].to_numpy(float))) for key in result.select_dtypes(float))
    elif is_dataclass(result) or isinstance(result, Mapping | list | tuple):
        if is_dataclass(result):
            parts = {field.name: getattr(result, field.name) for field in fields(result)}
        else:
            parts = dict(result if isinstance(result, Mapping) else enumerate(result))
        for key, part in parts.items():
            if key not in _OF_ROUNDING:
                yield from numbers_of(part, f"{name}.{key}")


def made(kind: str, layers: int) -> Any:
    """A small model; a type that fixes its number of layers keeps it."""
    with patch.dict(tiny.ONE, layers=layers):  # type: ignore[arg-type]
        return models_of_all()[kind]()


@cache
def on_cpu(kind: str, layers: int, folder: Path) -> Subject:
    return Subject(made(kind, layers), folder)


def placed(raw: Any, devices: Sequence[str]) -> Any:
    """The model on one device, or split over two as `device_map="auto"` does: blocks are whole."""
    if len(devices) == 1:
        raw.to(devices[0])
        raw.tie_weights()  # moving a parameter to this device makes a new one
        return raw
    most = int(0.6 * sum(parameter.nbytes for parameter in raw.parameters()))
    whole = raw._no_split_modules
    numbers = accelerate.infer_auto_device_map(raw, {0: most, 1: 4 * most}, no_split_module_classes=whole)
    places = {name: devices[number] for name, number in numbers.items()}
    raw = accelerate.dispatch_model(raw, places, main_device="cpu" if "cpu" in devices else None)
    assert {str(parameter.device) for parameter in raw.parameters()} == set(devices), places
    return raw


def measured(of: Subject, names: list[str]) -> dict[str, tuple[Tensor, float]]:
    assert of.model.certificate.ok, of.model.certificate.verdict
    numbers: dict[str, tuple[Tensor, float]] = {}
    for name in names:
        rounding = 0.0
        call = name.partition("(")[0]
        if call in _OF_LOSS or "metric" in signature(getattr(am, call, measured)).parameters:
            rounding = _ROUNDINGS * torch.finfo(torch.float32).eps * float(of.model.run(of.text).logits.abs().max())
        for stack in stacks_of(of, name):
            of.stack = stack
            result = CALLS[name](of)
            if not isinstance(result, Tensor):  # torch prints a tensor in float64
                look(result, of.folder)
            numbers |= {key: (value, rounding) for key, value in numbers_of(result, f"{name} {stack or ''}")}
        assert any(key.startswith(f"{name} ") for key in numbers), name
    return numbers


def compared(kind: str, names: list[str], folder: Path, devices: Sequence[str]) -> dict[str, float]:
    """The differences of one model's results, in units of their tolerance."""
    layers = 2 * len(devices)  # few, since a device without hardware is slow at every kernel
    expected = measured(on_cpu(kind, layers, folder), names)
    found = measured(Subject(placed(made(kind, layers), devices), folder), names)
    assert found.keys() == expected.keys()
    off = {key: difference(value, expected[key][0]) for key, (value, _) in found.items()}
    return {key: value / allowed(key, *expected[key]) for key, value in off.items()}


def allowed(name: str, value: Tensor, rounding: float) -> float:
    """The tolerance for a tensor, relative to its largest value; a single number has no scale but its own, and may be a
    sum that cancels.
    """
    relative = 1e-3 if name.rpartition(".")[2] in _RANKS else 1e-4 if value.numel() == 1 else 1e-5
    largest = float(value.nan_to_num(0.0, 0.0, 0.0).abs().max()) if value.numel() else 0.0
    return relative + rounding / max(largest, 1e-9)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    folder, float64, calls = sys.argv[1:]
    fake_device.install(float64=float64 == "float64")
    for devices, of_devices in json.loads(calls).items():
        for kind, names in of_devices.items():
            print(json.dumps([devices, kind, compared(kind, names, Path(folder), devices.split(","))]), flush=True)
    os._exit(0)  # torch shuts down before Python, and would call back into it
