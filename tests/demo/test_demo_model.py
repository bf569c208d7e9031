"""The shipped model loads without a network and has learnt its language."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BloomForCausalLM, PreTrainedTokenizerFast

from attnmech.demo import model_folder
from attnmech.demo.evaluate import evaluate, load, main
from attnmech.demo.text import PARAGRAPH
from attnmech.demo.tokenizer import build_tokenizer
from attnmech.errors import ModelNotFoundError


@pytest.fixture(scope="module")
def shipped() -> tuple[BloomForCausalLM, PreTrainedTokenizerFast]:
    return load()


def test_learnt_its_language(shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast]) -> None:
    figures = {figure.name: figure.value for figure in evaluate(*shipped, cases=50)}
    assert figures.pop("loss on documents (nats a word)") < 1.6
    assert {name for name, value in figures.items() if value < 0.9} == set()


def test_speaks_the_grammar_of_this_version(
    shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = shipped
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert model.config.vocab_size == len(tokenizer)


def test_expects_the_paragraph(shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast]) -> None:
    model, tokenizer = shipped
    tokens = tokenizer(PARAGRAPH, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss < 2.5


def test_folder_is_small_and_complete() -> None:
    files = {file.name for file in model_folder().iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= files
    assert (model_folder() / "model.safetensors").stat().st_size <= 12_000_000
    for file in model_folder().glob("*.json"):
        assert "_name_or_path" not in json.loads(file.read_text())


def test_evaluate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--cases", "5"])
    assert "recipient's name" in capsys.readouterr().out


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"expected a folder with a config\.json; got .*demo\.train --out"):
        load(tmp_path)


def test_importing_the_package_is_light() -> None:
    script = "import sys, attnmech.demo, attnmech.demo.text; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
