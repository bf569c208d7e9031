"""The examples run, and print what their docstrings promise."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from comparing import module_of

import attnmech as am

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    return module_of(EXAMPLES / f"{name}.py", f"example_{name}")


def test_which_heads_carry_a_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ablation = example("ablation")
    monkeypatch.setattr(ablation, "decoder_file", lambda: None)
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--per-template", "1", "--sets", "20"])
    ablation.main()
    printed = capsys.readouterr().out
    for task in ("copying", "agreement", "gender"):
        assert f"strong heads, {task}: " in printed
    assert "previous-token heads, agreement: not confirmed" in printed


def test_the_circuit_of_repeated_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["circuit.py", "--pairs", "2"])
    example("circuit").main()
    printed = capsys.readouterr().out
    assert "Estimate from integrated gradients of patching each of 1519 edges on 2 pairs" in printed
    assert printed.count("faithfulness_low") == 2


def test_words_are_repeated() -> None:
    """The answer is the word that followed the last word before."""
    task = example("ablation").repeated_words(am.load(), per_template=1)
    assert len(task.groups) == 12
    for case in task.cases:
        before = case.prompt.index(case.prompt[-1])
        assert case.prompt[before + 1] == case.answer != case.against and case.against in case.prompt


def test_the_right_answer_of_a_question_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nonliteral = example("nonliteral")
    for seed in range(20):
        prompt, answers = nonliteral.question(random.Random(seed), 4, "country", nonliteral.COUNTRIES)
        name = prompt.split()[-3]
        city = prompt.split(f"{name} lives in ")[1].split(".")[0]
        assert answers[0] == nonliteral.COUNTRIES[city] and len(set(answers)) == 4
    monkeypatch.setattr(nonliteral, "COUNT", 1)
    monkeypatch.setattr(sys, "argv", ["nonliteral.py"])
    nonliteral.main()
    assert capsys.readouterr().out.count("\n") == 5
