"""Tables and sentences in terminals of any width and encoding, and in pipes; they name the command's own options."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pandas as pd
import pytest
from rich.cells import cell_len

from attnmech.__main__ import main
from attnmech.cli import terminal
from attnmech.cli.terminal import as_options

WIDE: Final = pd.DataFrame(
    {
        "layer": [0, 11],
        "head": [3, 10],
        "types": ["previous token, induction, first token", "次" * 20],
        "token": ["[INST]", ":tada:"],
        **{f"number_{place}": [-0.5, 12.0] for place in range(8)},
    }
)


@pytest.mark.parametrize("width", [200, 80, 40, 12])
def test_a_table_that_does_not_fit_names_the_columns_left_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = terminal.console()
    with out.capture() as captured:
        terminal.print_rows(out, terminal.Rows("Heads of [INST]", WIDE, [terminal.Column(name) for name in WIDE]), 9)
    printed = captured.get()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line[:1] == "│"]
    shown = len(rows[0])
    assert [row[:2] for row in rows] == [["0", "3"], ["11", "10"]] and all(cell for row in rows for cell in row)
    table = [line for line in printed.splitlines() if line[:1] in "┏┃┡│└"]
    assert len({cell_len(line) for line in table}) == 1 and (width < 50 or cell_len(table[0]) <= width)
    left_out = ", ".join(name.replace("_", " ") for name in WIDE.columns[shown:])
    assert (f"Columns left out at this width: {left_out}. --json prints all." in " ".join(printed.split())) == bool(
        left_out
    )
    assert "Heads of [INST]" in printed and (shown < 4 or (rows[0][3], rows[1][3]) == ("[INST]", ":tada:"))


def test_a_pipe_gets_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = terminal.console()
    with out.capture() as captured:
        terminal.print_rows(out, terminal.Rows("Heads", WIDE, [terminal.Column(name) for name in WIDE]), 9)
    assert all(text in captured.get() for text in ("number 7", "previous token, induction, first token", "次" * 20))


def test_a_terminal_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["attnmech", "ablate", "--text", "Anna sang of shells.", "--out", str(tmp_path / "heads.csv")]

    def printed(*more: str) -> str:
        written = io.BytesIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", [*command, *more])
            patched.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
            return written.getvalue().decode("ascii")

    table = printed()
    assert "4 layers x 8 heads" in table and re.search(r"\s-\d", table) and "?" not in table
    assert "4 layers × 8 heads" in json.loads(printed("--overwrite", "--json"))["model"]


OPTIONS = [
    SimpleNamespace(name=name, opts=opts)
    for name, opts in (
        ("truncate", ["--truncate"]), ("dtype", ["--dtype"]), ("device", ["--device"]), ("k", ["-k"]),
        ("file", ["--file", "-f"]), ("target_text", ["--target-text"]),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("give truncate=True to cut it", "give --truncate to cut it"),
        ('in 16 bits (dtype="bfloat16") or device="cpu".', "in 16 bits (--dtype bfloat16) or --device cpu."),
        ("Try dtype=torch.float32.", "Try --dtype float32."),
        ("`k` must be at most 47", "-k must be at most 47"),
        ("dtype must be a floating-point type", "--dtype must be a floating-point type"),
        ("give `inputs`; `target` must have one text", "give --file; --target-text must have one text"),
        ('am.load(model, device="cpu") and `heads`', 'am.load(model, device="cpu") and `heads`'),
    ],
)
def test_arguments_are_named_as_options(message: str, expected: str) -> None:
    assert as_options(message, OPTIONS) == expected
    assert as_options(message, []) == message
