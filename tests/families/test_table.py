"""The documentation's table of architectures is complete and correct."""

from pathlib import Path

import models
import pytest
from test_examples import example

from attnmech.model.structure.families import ARCHITECTURES

EXAMPLES = Path(__file__).parents[2] / "examples"


def cells() -> tuple[list[str], list[list[str]]]:
    lines = [line for line in (EXAMPLES / "architectures.md").read_text("utf-8").splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return header, rows


def test_the_table_lists_every_architecture_and_every_variant() -> None:
    header, rows = cells()
    # The structure of these is read; they are among the models of every test.
    assert {row[0] for row in rows} == {*ARCHITECTURES, "bamba", "gpt_oss", "jamba", "lfm2", "vit"}
    assert [row[1] for row in rows if row[1]] == [row[1] for row in rows]
    every = models.MAKERS | models.NEW | models.OTHERS
    assert {row[1] for row in rows} == {name.replace("_", " ") for name in every}
    assert len(rows) == len({(row[1], row[2]) for row in rows})
    assert {row[2] for row in rows if row[1] == "t5"} == {"encoder", "decoder", "cross"}
    assert all(len(row) == len(header) for row in rows)


def test_every_row_holds_and_its_residuals_are_small() -> None:
    header, rows = cells()
    for row in rows:
        found = dict(zip(header, row, strict=True))
        assert found["certificate"].startswith("holds")
        assert float(found["float32"]) <= 1e-5
        assert (
            float(found["float64"]) <= 1e-12 if not found["float64"].startswith("–") else row[0] in ("gpt_oss", "jamba")
        )


def test_every_note_is_there() -> None:
    text = (EXAMPLES / "architectures.md").read_text("utf-8")
    _, rows = cells()
    marks = {int(part.split("]")[0]) for row in rows for cell in row for part in cell.split("[")[1:]}
    assert marks == set(range(1, len(marks) + 1))
    for mark in marks:
        assert f"\n{mark}. " in text


@pytest.mark.parametrize("name", ["falcon_alibi_serial", "gemma2", "qwen3_bias", "gptj"])
def test_the_page_is_what_the_command_writes(name: str) -> None:
    """The cells of one variant, without residuals (which depend on the machine) and numbers of notes."""
    page = example("architectures")
    line = next(line for line in page.table([name]).splitlines() if f"| {name.replace('_', ' ')} |" in line)
    made = [cell.strip().split(" [")[0] for cell in line.strip("|").split("|")][:-2]
    _, rows = cells()
    kept = next(row for row in rows if row[1] == name.replace("_", " "))
    assert made == [cell.split(" [")[0] for cell in kept][:-2]
