"""The tests check the annotations of every call: each fault planted here is detected."""

import importlib
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import TypeCheckError

pytestmark = pytest.mark.core

PLANTED = """
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from jaxtyping import Float
from torch import Tensor


def product(
    a: Float[Tensor, "row inner"], b: Float[Tensor, "inner column"], wrong: bool = False
) -> Float[Tensor, "row column"]:
    return b if wrong else a @ b


def twice(number: int, *further: int, to: str = "", **named: float) -> str:
    return to if to != "none" else None


def counted(to: int) -> Iterator[int]:
    yield from range(to)


def inside(value: Float[Tensor, "one"]) -> Float[Tensor, "other"]:
    def part(value: Float[Tensor, "two two"]) -> Float[Tensor, "two"]:
        return value[0]

    return part(value.expand(len(value), -1))


def scaled(by: float) -> Callable[[float], float]:
    def part(value: float) -> float:
        return value * by

    return part


@dataclass(frozen=True)
class Later:
    values: Float[Tensor, "head"]
    weights: Float[Tensor, "head"]

    def plus(self, number: int) -> Self:
        return self

    @property
    def first(self) -> int:
        return float(self.values[0])

    @staticmethod
    def still(number: int) -> int:
        return number

    @classmethod
    def made(cls, values: Float[Tensor, "head"]) -> "Later":
        return cls(values, values)


def later(value: "Later") -> "Later":
    return value


@dataclass(frozen=True)
class Latest(Later):
    further: int = 0
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("planted") / "planted_module.py"
    path.write_text(PLANTED)
    with pytest.MonkeyPatch.context() as patch, jaxtyping.install_import_hook("planted_module", "checking.checked"):
        patch.syspath_prepend(path.parent)
        return importlib.import_module("planted_module")


A, B, V = torch.ones(2, 3), torch.ones(3, 4), torch.ones(5)


def test_what_is_right_passes(planted: Any) -> None:
    torch.testing.assert_close(planted.product(A, B), A @ B)
    assert planted.twice(1, 2, 3, to="x", named=1.5) == "x"
    made = planted.Later.made(V)
    assert planted.later(made) is made.plus(3) is made
    assert list(planted.counted(2)) == [0, 1] and planted.Later.still(2) == 2
    assert planted.inside(V).shape == (5,)
    assert [planted.scaled(by)(3.0) for by in (2.0, 5.0)] == [6.0, 15.0]
    assert planted.Latest(V, V, further=2).further == 2


WRONG = {
    "an axis that differs between arguments": lambda m: m.product(A, A),
    "an axis that differs between argument and value": lambda m: m.product(A, B, wrong=True),
    "a dtype": lambda m: m.product(A.int(), B),
    "one of many": lambda m: m.twice(1, 2, "3"),
    "what a string names": lambda m: m.later(3),
    "what a generator is given": lambda m: m.counted("3"),
    "a function within": lambda m: m.inside(torch.ones(5, 4)),
    "a function made anew": lambda m: [m.scaled(by)(value) for by, value in ((2.0, 3.0), (5.0, "3"))],
    "a field": lambda m: m.Later(V, 3),
    "an axis that differs between fields": lambda m: m.Later(V, torch.ones(4)),
    "a method that returns Self": lambda m: m.Later(V, V).plus("3"),
    "a property": lambda m: m.Later(V, V).first,
}


@pytest.mark.parametrize("of", WRONG)
def test_what_is_wrong_fails(planted: Any, of: str) -> None:
    with pytest.raises(TypeCheckError):
        WRONG[of](planted)
