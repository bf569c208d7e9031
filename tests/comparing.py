"""What several tests compare: tensors, gradients with differences, what another process prints, and errors; scripts."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

TESTS: Final = Path(__file__).parent


def close(ours: Tensor, theirs: Tensor, tolerance: float, size: float = 0.0) -> None:
    """Whether two tensors differ by at most `tolerance` times the largest value, or times `size` if that is larger."""
    assert ours.shape == theirs.shape and not theirs.isnan().any()
    size = max(size, float(theirs.abs().max()), 1e-30)
    difference = float((ours - theirs).abs().max())
    assert difference <= tolerance * size, f"off by {difference:.2e}, largest {size:.2e}"


def require_gradient(
    model: am.HookedModel, inputs: Any, key: str | tuple[str, int], measure: Callable[[Tensor], Tensor], *, step: float,
    relative: float,
) -> None:  # fmt: skip
    """d measure / d point along a random direction, against the difference of two runs."""
    run = model.run(inputs, points=[key], gradients_of=measure)
    assert run.gradients is not None
    direction = torch.randn(run[key].shape, generator=torch.Generator().manual_seed(5), dtype=run[key].dtype)
    along, ends = run.gradients[key] * direction, []
    for shift in (step * direction, -step * direction):
        with model.hooks({key: lambda value, shift=shift: value + shift}):
            ends.append(float(measure(model.run(inputs).logits.double()).sum()))
    assert float(along.abs().max()) > 0
    assert float(along.sum()) == pytest.approx(
        (ends[0] - ends[1]) / (2 * step), rel=relative, abs=relative * float(along.norm())
    )


def printed_by(script: Path, *arguments: str) -> list[Any]:
    """The JSON that a script prints, line by line, in a process of its own."""
    folders = [*map(str, (script.parent, TESTS, TESTS.parent / "benchmarks")), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def module_of(path: Path, name: str) -> ModuleType:
    """The module in a file outside all packages."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def message_of(call: Callable[[], Any], error: type[Exception] = InputError) -> str:
    """The one line of an error of attnmech."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, am.AttnmechError)
    assert message and "\n" not in message
    return message


def refuses(
    message: str, call: Callable[..., Any], *given: Any, error: type[Exception] = InputError, **options: Any
) -> None:
    """Asserts that a call raises an error of attnmech, in one line that this pattern matches."""
    said = message_of(lambda: call(*given, **options), error)
    assert re.search(message, said), said
