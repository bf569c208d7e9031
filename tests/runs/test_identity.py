"""A digest differs between functions that do different things, and is the same in every process."""

import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import attnmech as am
from attnmech.runs.identity import digest_of

SCALE = 2.0


def scaled(by: Any) -> Callable[[Any], Any]:
    return lambda value: by * value


def defaults(by: float = 2.0, *, shift: float = 0.0) -> float:
    return by + shift


class Judge:
    """A callable with a state, whose use its class defines."""

    weight = 1.0

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return self.by * value

    def method(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Point:
    x: float
    y: Any = None

    @functools.cached_property
    def length(self) -> float:
        return abs(self.x)


def in_code(source: str, **held: Any) -> Any:
    """The function `f` of some source, compiled anew each time."""
    names: dict[str, Any] = {"__name__": "__main__", **held}
    exec(compile(source, f"<{random.random()}>", "exec"), names)
    return names["f"]


CLOSED_OVER = {
    "number": (2.0, 3.0),
    "text": ("a", "b"),
    "list": ([1, [2, 3]], [1, [2, 4]]),
    "kind": ([1], (1,)),
    "mapping": ({"a": 1, "b": {2}}, {"a": 1, "b": {3}}),
    "set": (frozenset("abcdefgh"), frozenset("abcdefgi")),
    "tensor": (torch.arange(5000), torch.arange(5000).where(torch.arange(5000) != 2500, 0)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "array": (np.arange(5000), np.arange(5000) % 4999),
    "frame": (pd.DataFrame({"a": [1.0, 2.0]}), pd.DataFrame({"a": [1.0, 3.0]})),
    "module": (nn.Linear(2, 3).requires_grad_(False), nn.Linear(2, 3)),
    "torch's own": (torch.nn.functional.relu, torch.nn.functional.gelu),
    "builtin": (len, sum),
    "type": (torch.float32, torch.float64),
    "object": (Judge(2.0), Judge(3.0)),
    "method": (Judge(2.0).method, Judge(3.0).method),
    "dataclass": (Point(1.0), Point(2.0)),
    "class": (Judge, Point),
    "partial": (functools.partial(scaled, 2), functools.partial(scaled, 3)),
    "cached": (functools.cache(scaled(2)), functools.cache(scaled(3))),
    "wrapped": (torch.no_grad()(scaled(2)), torch.no_grad()(scaled(3))),
    "function": (scaled(2), scaled(3)),
    "values": (am.results.Values({0: torch.ones(1, 1, 2, 3)}), am.results.Values({0: torch.zeros(1, 1, 2, 3)})),
    "intervention": (am.Intervention.zero([(0, 1)]), am.Intervention.zero([(0, 2)])),
}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_what_a_closure_holds_counts(name: str) -> None:
    one, other = CLOSED_OVER[name]
    assert digest_of(scaled(one)) == digest_of(scaled(one))
    assert digest_of(scaled(one)) != digest_of(scaled(other))


def test_equal_values_have_one_digest() -> None:
    weights = torch.randn(4, 3)
    for make in (
        lambda: {"b": 2, "a": [1, {3}]},
        lambda: {"a": [1, {3}], "b": 2},
        lambda: {"a": [int("1"), set(range(3, 4))], "b": 2},
    ):
        assert digest_of(make()) == digest_of({"a": [1, {3}], "b": 2})
    assert digest_of([weights, weights]) == digest_of([weights, weights.clone()])
    assert digest_of(weights.T) == digest_of(weights.T.contiguous())
    layer = nn.Linear(3, 2)
    again = nn.Linear(3, 2)
    again.load_state_dict(layer.state_dict())
    assert digest_of(layer) == digest_of(again)
    # Cached properties of an object do not change its digest.
    point = Point(-3.0)
    before = digest_of(point)
    assert point.length == 3.0 and digest_of(point) == before == digest_of(replace(point))


SCRIPT = """
THRESHOLD = 0.5
WEIGHTS = torch.ones(3)
class Scale:
    by = 1
    def __call__(self, x): return self.by * x
class Twice(Scale): pass
twice = Twice()
def helper(x):
    return [(lambda y: y + WEIGHTS)(part) for part in x]
def make(shift):
    def metric(logits, batch, by=2.0, *, least=0):
        return twice(helper(logits.real)) * by + shift - 7 * (logits > THRESHOLD)
    return metric
f = make(4)
"""
EDITS = {
    "the body": ("- 7", "- 8"),
    "an attribute that the body names": ("logits.real", "logits.imag"),
    "an operation": ("* by", "/ by"),
    "a constant of the file": ("THRESHOLD = 0.5", "THRESHOLD = 0.6"),
    "a tensor of the file": ("ones(3)", "zeros(3)"),
    "a helper in the file": ("y + WEIGHTS", "y - WEIGHTS"),
    "what the closure holds": ("make(4)", "make(5)"),
    "a default": ("by=2.0", "by=3.0"),
    "a default by keyword": ("least=0", "least=1"),
    "a method": ("self.by * x", "self.by + x"),
    "an attribute of a class": ("by = 1", "by = 2"),
    "a parent": ("Twice(Scale): pass", "Twice(list): __call__ = Scale.__call__"),
    "a builtin hidden": ("def helper", "list = sum\ndef helper"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_script_counts(name: str) -> None:
    script = SCRIPT.replace("logits >", "list(logits) >") if name == "a builtin hidden" else SCRIPT
    old, new = EDITS[name]
    edited = script.replace(old, new)
    assert edited != script
    assert digest_of(in_code(script, torch=torch)) != digest_of(in_code(edited, torch=torch))


def test_what_does_not_change_a_function_does_not_count() -> None:
    first = in_code(SCRIPT, torch=torch)
    digest = digest_of(first)
    comments = SCRIPT.replace("    return twice", "    # why\n\n        return twice")
    for other in (SCRIPT, f"\n\n{SCRIPT}", comments, f"{SCRIPT}\nOTHER = [1]\ndef another(): return 3"):
        assert digest_of(in_code(other, torch=torch)) == digest
    plain = in_code("def f(value): return 2.0 * value")
    before = digest_of(plain)
    for value in range(200):  # the interpreter rewrites code that runs often
        plain(value)
    assert digest_of(plain) == before


def test_what_code_takes_of_a_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helpers_of_a_test.py").write_text("BY = 2.0\nOTHER = 1\ndef half(x): return x / BY\n")
    import helpers_of_a_test as helpers  # type: ignore[import-not-found]

    functions = [in_code(f"def f(x): return helpers.{name}", helpers=helpers) for name in ("BY * x", "half(x)")]
    before = [digest_of(function) for function in functions]
    monkeypatch.setattr(helpers, "OTHER", 5)
    assert [digest_of(function) for function in functions] == before
    monkeypatch.setattr(helpers, "BY", 3.0)
    assert all(digest_of(function) != was for function, was in zip(functions, before, strict=True))


def test_functions_that_call_each_other() -> None:
    mutual = "def g(x): return f(x - {}) if x else 0\ndef f(x): return g(x)"
    assert digest_of(in_code(mutual.format(1))) == digest_of(in_code(mutual.format(1)))
    assert digest_of(in_code(mutual.format(1))) != digest_of(in_code(mutual.format(2)))


def test_what_hides_its_content_counts_by_its_type() -> None:
    generators, locks = ([(n for n in range(3)) for _ in range(2)], [threading.Lock() for _ in range(2)])
    assert digest_of(generators[0]) == digest_of(generators[1]) != digest_of(locks[0])
    assert digest_of(locks[0]) == digest_of(locks[1])


def test_a_model_counts_by_its_weights() -> None:
    model = models.hooked("gpt2")
    changed = models.fresh("gpt2")
    changed.transformer.h[1].mlp.c_fc.weight.data[3, 2] += 1e-3
    before = digest_of(scaled(model))
    model.run(models.token_ids("gpt2"))
    assert digest_of(scaled(model)) == before
    assert digest_of(scaled(am.load(changed))) != before


ELSEWHERE = """
import sys
sys.path[:0] = sys.argv[1:]
from test_identity import CLOSED_OVER, Judge, defaults, digest_of, in_code, scaled, uses_globals
for name, (one, other) in CLOSED_OVER.items():
    if name != "module":  # of random weights
        print(digest_of(scaled(one)), digest_of(scaled(other)))
print(digest_of(defaults), digest_of(Judge(2.0)), digest_of(uses_globals))
"""


def uses_globals(value: Any) -> Any:
    return SCALE * torch.relu(value) + np.float64(defaults()) if value in {"a", "b", "c", "d"} else Judge(len)


def test_every_process_finds_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """This process, and one with another seed of hashes."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["-c", *folders])
    exec(ELSEWHERE, {})
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *folders], env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert capsys.readouterr().out == done.stdout
    assert len(done.stdout.split()) == 2 * (len(CLOSED_OVER) - 1) + 3
