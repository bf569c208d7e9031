"""A digest tells functions apart by what they do, and is the same in every process."""

import functools
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
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
from attnmech.runs.identity import digest_of, hooks_digests

SCALE = 2.0


def scaled(by: Any) -> Callable[[Any], Any]:
    return lambda value: by * value


def defaults(by: float = 2.0, *, shift: float = 0.0) -> float:
    return by + shift


class Judge:
    """Has a state, and does with it what its class says."""

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


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: float) -> None:
        self.x = x


def in_code(source: str, **held: Any) -> Any:
    """The function `f` of some source, compiled anew each time."""
    names: dict[str, Any] = {"__name__": "__main__", **held}
    exec(compile(source, f"<{random.random()}>", "exec"), names)
    return names["f"]


CLOSED_OVER = {
    "number": (2.0, 3.0),
    "whole or not": (1, 1.0),
    "truth or number": (1, True),
    "nan": (float("nan"), 0.0),
    "text": ("a", "b"),
    "text or bytes": ("a", b"a"),
    "surrogate": ("\ud800", "\udfff"),
    "list": ([1, [2, 3]], [1, [2, 4]]),
    "nested": ([1, [2]], [[1], 2]),
    "kind": ([1], (1,)),
    "mapping": ({"a": 1, "b": {2}}, {"a": 1, "b": {3}}),
    "set": (frozenset("abcdefgh"), frozenset("abcdefgi")),
    "ordered": (OrderedDict(a=1), OrderedDict(a=2)),
    "default": (defaultdict(int, a=1), defaultdict(float, a=1)),
    "tensor": (torch.arange(5000), torch.arange(5000).where(torch.arange(5000) != 2500, 0)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "half": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "sparse": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "array": (np.arange(5000), np.arange(5000) % 4999),
    "objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "frame": (pd.DataFrame({"a": [1.0, 2.0]}), pd.DataFrame({"a": [1.0, 3.0]})),
    "module": (nn.Linear(2, 3).requires_grad_(False), nn.Linear(2, 3)),
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "torch's own": (torch.nn.functional.relu, torch.nn.functional.gelu),
    "builtin": (len, sum),
    "bound": ([1, 2].count, [1, 3].count),
    "type": (torch.float32, torch.float64),
    "path": (Path("a"), Path("b")),
    "object": (Judge(2.0), Judge(3.0)),
    "method": (Judge(2.0).method, Judge(3.0).method),
    "another method": (Judge(2.0).method, Judge(2.0).__call__),
    "dataclass": (Point(1.0), Point(2.0)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "class": (Judge, Point),
    "partial": (functools.partial(scaled, 2), functools.partial(scaled, 3)),
    "cached": (functools.cache(scaled(2)), functools.cache(scaled(3))),
    "wrapped": (torch.no_grad()(scaled(2)), torch.no_grad()(scaled(3))),
    "function": (scaled(2), scaled(3)),
    "values": (am.Values({0: torch.ones(1, 1, 2, 3)}), am.Values({0: torch.zeros(1, 1, 2, 3)})),
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
    # What an object only remembers of itself says nothing of it.
    point = Point(-3.0)
    before = digest_of(point)
    assert point.length == 3.0 and digest_of(point) == before == digest_of(replace(point))


def test_code_counts_and_its_place_does_not() -> None:
    source = "def f(value):\n    return 2.0 * value"
    first = digest_of(in_code(source))
    assert digest_of(in_code("\n\n" + source)) == first
    for other in ("3.0 * value", "2.0 + value", "2.0 * value.T", "(lambda x: 3.0 * x)(value)", "value if value else 0"):
        assert digest_of(in_code(f"def f(value):\n    return {other}")) != first
    inner = "def f(value):\n    return (lambda x: {} * x)(value)"
    assert digest_of(in_code(inner.format(2))) != digest_of(in_code(inner.format(3)))
    called = in_code(source)
    for value in range(200):  # the interpreter rewrites code that runs often
        called(value)
    assert digest_of(called) == first


def test_defaults_and_attributes_count() -> None:
    plain = "def f(value, by={}, *, shift={}):\n    return by * value + shift"
    assert digest_of(in_code(plain.format(2, 0))) == digest_of(in_code(plain.format(2, 0)))
    assert digest_of(in_code(plain.format(2, 0))) != digest_of(in_code(plain.format(3, 0)))
    assert digest_of(in_code(plain.format(2, 0))) != digest_of(in_code(plain.format(2, 1)))
    one, other = (in_code("def f(value):\n    return f.by * value") for _ in range(2))
    one.by, other.by = 2, 3
    assert digest_of(one) != digest_of(other)


GLOBALS = {
    "a number": ("def f(x): return BY * x", {"BY": 2.0}, {"BY": 3.0}),
    "a tensor": ("def f(x): return BY * x", {"BY": torch.ones(3)}, {"BY": torch.zeros(3)}),
    "another function": ("def f(x): return g(x)", {"g": scaled(2)}, {"g": scaled(3)}),
    "in a lambda": ("def f(x): return (lambda y: BY * y)(x)", {"BY": 2}, {"BY": 3}),
    "in a comprehension": ("def f(x): return [BY * y for y in x]", {"BY": 2}, {"BY": 3}),
    "missing so far": ("def f(x): return BY * x", {}, {"BY": 3}),
    "a builtin hidden": ("def f(x): return abs(x)", {}, {"abs": scaled(3)}),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_globals_that_code_names_count(name: str) -> None:
    source, one, other = GLOBALS[name]
    assert digest_of(in_code(source, **one)) == digest_of(in_code(source, **one))
    assert digest_of(in_code(source, **one)) != digest_of(in_code(source, **other))
    assert digest_of(in_code(source, **one)) == digest_of(in_code(source, **one, OTHER=[1, 2])), (
        "no other global counts"
    )


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


def test_the_code_of_classes_counts() -> None:
    source = "class K{}:\n    by = {}\n    def __call__(self, x):\n        return {} * x\nf = K()"
    first = digest_of(in_code(source.format("", 1, 2)))
    assert digest_of(in_code(source.format("", 1, 2))) == first
    for other in ("", 1, 3), ("", 5, 2), ("(list)", 1, 2):
        assert digest_of(in_code(source.format(*other))) != first
    parent = "class P:\n    def scale(self): return {}\nclass K(P):\n    def __call__(self, x): return x\nf = K()"
    assert digest_of(in_code(parent.format(2))) != digest_of(in_code(parent.format(3)))


def test_values_that_hold_themselves() -> None:
    def cycle(last: int) -> list[Any]:
        found: list[Any] = [1]
        found += [found, {"a": found}, last]
        return found

    assert digest_of(cycle(2)) == digest_of(cycle(2)) != digest_of(cycle(3))
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


def test_hooks_in_force_count_in_their_order() -> None:
    model = models.hooked("gpt2")
    assert hooks_digests(model) == []
    one, other = scaled(2.0), scaled(3.0)
    found = []
    for edits in ({("z", 0): one}, {("z", 0): other}, {("z", 1): one}, {("z", 0): one, ("z", 1): other}):
        with model.hooks(edits):
            found.append(hooks_digests(model))
    with model.hooks({("z", 0): one}), model.hooks({("z", 0): other}):
        found.append(hooks_digests(model))
    with model.hooks({("z", 0): other}), model.hooks({("z", 0): one}):
        found.append(hooks_digests(model))
    for value in (0.5, 0.25):
        values = am.Values({0: torch.full((1, 1, 5, 4), value)}, "the same words")
        with model.intervene(am.Intervention.replace([(0, 1)], values)):
            found.append(hooks_digests(model))
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


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


def test_every_process_finds_the_same() -> None:
    root = Path(__file__).parents[2]
    told = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent), str(root / "tests")],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.add(done.stdout)
    assert len(told) == 1 and len(told.pop().split()) == 2 * (len(CLOSED_OVER) - 1) + 3
