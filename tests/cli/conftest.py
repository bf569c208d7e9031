"""The command line, run in this process."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from attnmech.cli import main as cli


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The errors and warnings, with line breaks as spaces."""
        return " ".join(self.err.split())


Command = Callable[..., Ended]


@pytest.fixture
def attnmech(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", ["attnmech", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Ended(int(stopped.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmech.model.files.load.load", None)
