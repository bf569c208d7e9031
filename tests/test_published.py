"""The scripts that compare attnmech with published results run, and docs/published.md shows their tables."""

import importlib
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface

import attnmech as am

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "published"
PAGE = (ROOT / "docs" / "published.md").read_text("utf-8")

TINY = {
    "induction": ["--seeds", "1", "--steps", "20"],
    "backcopy": ["--seeds", "1", "--steps", "3"],
    "modular_addition": ["--seeds", "1", "--p", "7", "--epochs", "100"],
    "drift": ["--seeds", "1", "--texts", "3"],
    "attentionviz": ["--seeds", "1", "--texts", "3", "--sample", "60"],
}
"""Smallest settings of each script. Trained models are replaced by the demo model."""


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shared = importlib.import_module("shared")
    for model in ("encoder", "decoder"):
        monkeypatch.setattr(shared, model, am.load)


def test_every_script_is_tried_out_and_described() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} - {"shared"} == set(TINY)
    for name in TINY:
        assert f"`python benchmarks/published/{name}.py`" in PAGE


@pytest.mark.parametrize("name", TINY)
def test_a_script_prints_the_rows_of_its_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TINY[name]])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    printed = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) > 3
    for row in printed[1:]:
        assert row == "| ---" or f"\n{row} |" in PAGE


def test_plain_torch_agrees_with_attnmech_on_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that the column of ReLU takes from plain torch."""
    backcopy = runpy.run_path(str(SCRIPTS / "backcopy.py"))
    torch.manual_seed(0)
    chain = backcopy["Chain"](torch.randn(backcopy["BOS"], backcopy["BOS"]).softmax(dim=-1))
    model, ids = backcopy["trained"](backcopy["small_model"](2, "eager"), chain, 3), chain.texts(20)
    ours, plain = (backcopy["numbers"](backcopy[name](model, ids), chain, ids) for name in ("by_attnmech", "by_hand"))
    for name in list(plain)[:6]:
        assert ours[name] == pytest.approx(plain[name], rel=1e-4)


def test_waves_are_found_by_their_frequency() -> None:
    """Closed forms: a sum of waves with known frequencies and amplitudes."""
    addition = runpy.run_path(str(SCRIPTS / "modular_addition.py"))
    a, b, c = (2 * math.pi * axis / 11 for axis in torch.meshgrid(*[torch.arange(11.0).double()] * 3, indexing="ij"))
    shares = addition["logit_shares"](3 * torch.cos(2 * (a + b - c)) + torch.sin(5 * (a + b - c)) + torch.cos(a))
    assert shares.tolist() == pytest.approx([0, 0.9, 0, 0, 0.1])  # cos(a) does not depend on c
    attention = (4 * torch.cos(3 * a) + 2 * torch.cos(3 * a - b) + torch.sin(2 * b) + 7)[None, :, :, 0]
    assert addition["attention_share"](attention, [3]) == pytest.approx(16 / 21)
    assert addition["attention_share"](attention, [3, 1]) == pytest.approx(20 / 21)
    assert addition["attention_share"](attention, [2, 4, 5]) == pytest.approx(1 / 21)


def test_attention_through_relu_is_refused() -> None:
    backcopy = runpy.run_path(str(SCRIPTS / "backcopy.py"))
    AttentionInterface.register("relu", backcopy["relu_attention"])
    torch.manual_seed(0)
    with pytest.warns(match="NOT certified"):
        model = am.load(backcopy["small_model"](1, "relu"))
    for call in (am.null_attention, am.head_types, am.residual_updates):
        with pytest.raises(am.errors.CertificateError, match="output of plain transformers does not hold"):
            call(model, {"input_ids": torch.arange(20)[None]})
